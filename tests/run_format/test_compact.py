"""`compact` and the removal of runs: the run reads the same, and nothing foreign is ever touched."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from factories import RunFactory
from hypothesis import given, settings
from hypothesis import strategies as st
from run_records import _records
from small_disk import small_disk as small_disk

from tapscope import cli
from tapscope.core.errors import RunCorruptError, RunExistsError
from tapscope.run_format import record
from tapscope.run_format.compact import compact_run
from tapscope.run_format.directory import create_run, remove_run
from tapscope.run_format.ledger import StepCounts, late_line
from tapscope.run_format.parquet import read_table, schema, write_table
from tapscope.run_format.record import Record
from tapscope.run_format.record_parser import RecordLines
from tapscope.run_format.records import Records
from tapscope.run_format.writer import RankWriter
from tapscope.sources import open_run


def toy(path: Path) -> Path:
    with RunFactory(path, mesh={"tp": 2}) as run:
        run.site("layers.0:out", params={"weight": [2, 3]})
        for step in range(3):
            run.step(token_ids=[step])
            run.put("layers.0:out", {0: np.ones((3, 2), np.float32), 1: np.full((3, 2), np.nan)}, dims="t h")
            run.put("layers.1:out", np.zeros(2, np.float64), rows=[(0, 2)])
            run.put("layers.2:out", np.array([1e300, 1e300]), keep="stats")
        run.writers[0].line({"type": "metric", "step": 1, "name": "loss", "value": 0.5})
        run.writers[0].line(late_line(0, StepCounts(1, 1)))
        value = {"type": "record", "seq": 90, "site": "m:in[x]", "step": 0, "value": {"type": "int", "value": 3}}
        run.writers[0].line(value)
    return path


def everything(path: Path) -> dict[str, object]:
    """All that a reader says of a run, but for the events of compaction."""
    with open_run(path) as run:
        return {
            "records": list(run.records),
            "lines": [record.encode(rec) for rec in run.records],
            "values": [bytes(run.array(rec)) for rec in run.records if rec.entry],
            "ledger": run.ledger(),
            "steps": run.steps,
            "sites": run.sites,
            "metrics": run.metrics(),
            "events": [event for event in run.events() if event.kind != "compacted"],
            "manifest": {k: v for k, v in run.manifest.items() if k != "version"},
            "table": run.table().rows(),
        }


def comparable(found: dict[str, object]) -> str:
    return repr(found)  # nan is nan


def test_compact_keeps_what_readers_see(tmp_path: Path, capsys) -> None:
    path = toy(tmp_path / "run")
    before = everything(path)
    assert cli.main(["compact", str(path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line[:22] for line in out] == ["rank 0     10 records:", "rank 1     3 records: "]
    assert comparable(everything(path)) == comparable(before)
    assert b'"record"' not in (path / "rank-00000/records.jsonl").read_bytes()
    assert cli.main(["verify", str(path)]) == 0
    assert "payloads   9 payloads match their recorded hash" in capsys.readouterr().out
    assert cli.main(["compact", str(path)]) == 0
    assert capsys.readouterr().err == f"nothing to compact: {path} has no record lines\n"
    assert cli.main(["info", str(path)]) in (0, 1)


_lines = st.lists(_records, max_size=8)


@given(_lines, st.integers(0, (1 << 63) - 1), st.booleans())
@settings(max_examples=60)
def test_compact_round_trips_every_record(tmp_path_factory, items: list[Record], huge: int, strange: bool) -> None:
    path = tmp_path_factory.mktemp("table") / "t.parquet"
    lines = [json.loads(record.encode(item)) for item in items]
    if lines and strange:
        lines[0] |= {"unknown": {"a": [1]}, "seq": huge, "shape": [huge, 2]}
        lines[-1]["stats"] = {**lines[-1].get("stats", dict.fromkeys(_STATS, 0)), "count": huge, "min": 3, "new": 1}
    found = [record.from_json(line, 3) for line in lines]
    write_table(Records(), zip(found, lines, strict=True), path)
    again = read_table(path, 3)
    assert again == found
    assert [record.encode(item) for item in again] == [record.encode(item) for item in found]
    plain = Records()
    read = RecordLines(3, plain, exact=True).read
    others = [each for each, line in zip(found, lines, strict=True) if not read(json.dumps(line).encode())]
    write_table(plain, [(each, record.to_json(each)) for each in others], path)
    again = read_table(path, 3)
    assert again == [*plain, *others]
    assert [record.encode(item) for item in again] == [record.encode(item) for item in [*plain, *others]]


_STATS = ("count", "nan", "posinf", "neginf", "zeros", "subnormals", "min", "max", "absmax", "sum", "sumsq")


def test_compact_table_has_the_documented_columns(tmp_path: Path) -> None:
    path = toy(tmp_path / "run")
    compact_run(path)
    frame = pl.read_parquet(path / "rank-00000/records.parquet")
    assert dict(frame.schema) == schema()
    page = (Path(__file__).resolve().parents[2] / "docs/reference/run-format.md").read_text()
    assert all(f"`{name}`" in page for name in schema())
    overflowed = frame.filter(pl.col("site") == "layers.2:out")
    assert overflowed["sumsq"].to_list() == [None] * 3
    assert overflowed["count"].to_list() == [2] * 3


def test_compact_keeps_unreadable_lines_and_adds_tables_for_later_records(tmp_path: Path) -> None:
    path = toy(tmp_path / "run")
    index = path / "rank-00000/records.jsonl"
    with index.open("ab") as file:
        file.write(b'{broken\n{"type":"record","seq":1}\n{"type":"newer","a":1}\n')
    problems = len(open_run(path).problems)
    compact_run(path)
    assert index.read_bytes().count(b"{broken\n") == 1
    assert len(open_run(path).problems) == problems == 3
    with index.open("ab") as file:
        file.write(b'{"type":"record","seq":91,"site":"m:out","step":0}\n')
    before = open_run(path).records
    (done,) = compact_run(path)
    assert (done.rank, done.num_records) == (0, 1)
    assert (path / "rank-00000/records-2.parquet").exists()
    assert open_run(path).records == before


def test_compact_table_damage_is_reported(tmp_path: Path) -> None:
    path = toy(tmp_path / "run")
    compact_run(path)
    table = path / "rank-00001/records.parquet"
    content = table.read_bytes()
    table.write_bytes(content[:-20])
    assert any("records.parquet: cannot be read, and with it 3 records" in said for said in open_run(path).problems)
    table.unlink()
    assert any("records.parquet: cannot be read" in said for said in open_run(path).problems)
    others = read_table(path / "rank-00000/records.parquet", 1)
    with pytest.raises(ValueError, match="have members without a column"):
        write_table(others, [], table)
    write_table(Records(), [(each, record.to_json(each)) for each in others], table)
    assert any("holds 10 records, 3 were compacted" in said for said in open_run(path).problems)


@pytest.mark.parametrize("column", ["count", "nan", "subnormals"])
def test_compact_table_of_negative_counts_is_reported(tmp_path: Path, column: str) -> None:
    path = toy(tmp_path / "run")
    compact_run(path)
    table = path / "rank-00001/records.parquet"
    pl.read_parquet(table).with_columns(pl.lit(-5).cast(pl.Int64).alias(column)).write_parquet(table)
    _, problem = (said for said in open_run(path).problems if "records.parquet" in said)  # the first names the CRC-32
    assert "cannot be read, and with it 3 records: the counts of statistics are (" in problem
    assert cli.main(["ls", str(path)]) == 0


def test_compact_refuses_a_run_in_recording_or_torn(tmp_path: Path) -> None:
    path = toy(tmp_path / "run")
    writer = RankWriter(create(tmp_path / "live"), 0)
    writer.event("open", rank=0)
    with pytest.raises(RunExistsError, match="is being recorded"):
        compact_run(tmp_path / "live")
    writer.close()
    index = path / "rank-00001/records.jsonl"
    with index.open("ab") as file:
        file.write(b'{"type":')
    before = index.read_bytes()
    with pytest.raises(RunCorruptError, match=r"its last line is cut off; run first: tapscope repair .*run"):
        compact_run(path)
    assert index.read_bytes() == before


def create(path: Path) -> Path:
    create_run(path, {"world_size": 1})
    return path


KILLED = """
import os, sys
from pathlib import Path
calls = 0
def stop(*_):
    global calls
    calls += 1
    if calls == int(sys.argv[2]):
        os._exit(9)
for name in ("replace", "open"):
    was = getattr(Path, name)
    setattr(Path, name, lambda self, *a, was=was, **k: (stop(), was(self, *a, **k))[1])
from tapscope.run_format.compact import compact_run
compact_run(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("moment", range(1, 8))
def test_compact_killed_anywhere_loses_and_duplicates_nothing(tmp_path: Path, moment: int) -> None:
    path = toy(tmp_path / "run")
    before = comparable(everything(path))
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), str(moment)], check=False)
    assert done.returncode == 9
    assert comparable(everything(path)) == before
    compact_run(path)
    assert comparable(everything(path)) == before


def test_compact_on_a_full_disk_leaves_the_run_unchanged(small_disk: Path, capsys) -> None:
    path = toy(small_disk / "run")
    before = comparable(everything(path))
    free = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(free.f_bavail * free.f_bsize))
    assert cli.main(["compact", str(path)]) == 3
    assert "No space left on device" in (said := capsys.readouterr().err)
    assert said.endswith("it reads as before\n")
    with (path / "rank-00001/records.jsonl").open("r+b") as index:
        index.truncate(index.seek(0, 2) - 5)
    assert cli.main(["repair", str(path)]) == 3
    assert "rank-00001 cannot be repaired: [Errno 28]" in capsys.readouterr().err
    assert not list(path.rglob("*.new"))
    (small_disk / "filler").unlink()
    assert cli.main(["repair", str(path)]) == 0
    compact_run(path)
    assert len(open_run(path).records) == 13
    assert before.count("Record(") == 13


def test_compact_upgrades_version_1_to_2(tmp_path: Path) -> None:
    path = toy(tmp_path / "run")
    manifest = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(manifest | {"version": 1}))
    compact_run(path)
    assert json.loads((path / "run.json").read_text()) == manifest | {"hash_version": 1, "version": 2}
    assert open_run(path).hash_version == 1


def test_open_of_an_uncompacted_run_loads_no_polars(tmp_path: Path) -> None:
    path = toy(tmp_path / "run")
    program = "import sys; from tapscope.sources import open_run; open_run(sys.argv[1]); print('polars' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_remove_run_removes_the_whole_run(tmp_path: Path) -> None:
    path = toy(tmp_path / "run")
    compact_run(path)
    (path / "recorder.log").write_text("x")
    (path / "rank-00000/records.jsonl.torn~2").write_text("x")
    assert remove_run(path) == []
    assert not path.exists()


def test_remove_run_reports_foreign_files_and_follows_no_link(tmp_path: Path) -> None:
    path = toy(tmp_path / "run")
    precious = tmp_path / "precious"
    (precious / "rank-00003").mkdir(parents=True)
    (precious / "rank-00003/records.jsonl").write_text("mine")
    foreign = [path / "notes.txt", path / "rank-00000/weights.safetensors", path / "rank-x", path / "sub"]
    for file in foreign[:2]:
        file.write_text("mine")
    foreign[2].mkdir()
    foreign[3].mkdir()
    links = [path / "rank-00007", path / "rank-00001/seg-000009.safetensors", path / "recorder.log"]
    links[0].symlink_to(precious / "rank-00003")
    links[1].symlink_to(precious / "rank-00003/records.jsonl")
    links[2].symlink_to(precious / "rank-00003/records.jsonl")
    assert set(remove_run(path)) == {*foreign, *links}
    assert (precious / "rank-00003/records.jsonl").read_text() == "mine"
    left = {file for file in path.rglob("*") if not file.is_dir() or file.is_symlink()}
    assert left == {*foreign[:2], *links}


def test_remove_run_refuses_foreign_directories_links_and_active_runs(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/run.json").write_text('{"format": "something-else tapscope-run"}')
    path = toy(tmp_path / "run")
    os.symlink(path, tmp_path / "link")
    for refused in (tmp_path / "other", tmp_path / "link", tmp_path / "none", tmp_path):
        with pytest.raises(RunExistsError, match="not provably a tapscope run; nothing was removed"):
            remove_run(refused)
    writer = RankWriter(create(tmp_path / "live"), 0)
    with pytest.raises(RunExistsError, match="is being recorded"):
        remove_run(tmp_path / "live")
    writer.close()
    assert len(open_run(path).records) == 13
