"""`verify` and `repair`: what a killed recorder left is named, made whole, and never made worse."""

import fcntl
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from factories import RunFactory
from safetensors import safe_open

from tapscope import cli
from tapscope.core.errors import RunExistsError
from tapscope.run_format import directory
from tapscope.run_format.repair import repair_run
from tapscope.run_format.writer import RankWriter
from tapscope.sources import open_run

CUT_OFF = "rank 0 did not close: it or its recorder was killed; the run was repaired since"
WRITE = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from small_disk import lines_and_payloads
from tapscope.run_format.directory import create_run
from tapscope.run_format.writer import RankWriter
path = Path(sys.argv[1])
create_run(path, {{"world_size": 1}})
writer, done = RankWriter(path, 0, segment_bytes=300_000), 0
writer.event("open", rank=0, world_size=1, mesh={{}}, coords={{}})
while True:
    writer.batch(*lines_and_payloads(done, [3000, 0, 70_000, 5]))
    done += 4
    print(done, flush=True)
"""


@pytest.fixture(params=range(3))
def killed(request, tmp_path: Path) -> tuple[Path, int]:
    """A run whose writer was killed -9 at a random moment, and how many records it had acknowledged."""
    path = tmp_path / "killed"
    program = WRITE.format(tests=str(Path(__file__).resolve().parents[1] / "support"))
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(random.Random(request.param).uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        acknowledged = [4, *map(int, process.stdout.read().split())]
    return path, acknowledged[-1]


def unsealed_copy(path: Path) -> None:
    """Put back the blank header, as before sealing."""
    for segment in path.glob("rank-*/seg-*"):
        with segment.open("r+b") as file:
            reserved = int.from_bytes(file.read(8), "little")
            file.write(b" " * reserved)


def tensors_of(segment: Path) -> dict[str, np.ndarray]:
    with safe_open(segment, "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


def toy(path: Path) -> Path:
    with RunFactory(path) as run:
        run.step()
        for n in range(5):
            run.put(f"layers.{n}:out", np.full((3, n + 1), n, np.float32))
        run.put("layers.0:out", np.ones((2, 2), np.complex128))
    return path


def test_repair_seals_the_run_of_a_killed_recorder(killed: tuple[Path, int]) -> None:
    path, acknowledged = killed
    before = open_run(path).records
    assert len(before) >= acknowledged
    assert cli.main(["verify", str(path)]) == 1
    repair_run(path)
    with open_run(path) as run:
        assert run.records == before
        assert run.problems == []
        for rec in run.records:
            assert (run.array(rec) == rec.seq % 256).all()
        account = run.ledger()
        assert (account.cut_off, account.lost_ranks, account.open_ranks) == ([CUT_OFF], [], [])
    names = set()
    for segment in sorted((path / "rank-00000").glob("seg-*")):
        names |= set(tensors_of(segment))
    assert {rec.key.tensor_name for rec in before} <= names
    files = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert not any(one.needed or one.problems for one in repair_run(path))
    assert files == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_repair_header_equals_a_sealed_header(tmp_path: Path) -> None:
    path = toy(tmp_path / "run")
    segment = path / "rank-00000/seg-000000.safetensors"
    sealed = segment.read_bytes()
    unsealed_copy(path)
    assert segment.read_bytes() != sealed
    assert [one.sealed for one in repair_run(path)] == [["seg-000000.safetensors"]]
    assert segment.read_bytes() == sealed


def test_repair_keeps_torn_lines_and_orphaned_bytes(tmp_path: Path) -> None:
    path = toy(tmp_path / "run")
    unsealed_copy(path)
    index, segment = path / "rank-00000/records.jsonl", path / "rank-00000/seg-000000.safetensors"
    lines = index.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if b'"layers.4:out"' not in line and b'"close"' not in line]
    index.write_bytes(b"".join(kept) + b'{"type":"record","seq":9')
    with segment.open("ab") as file:
        file.write(b"tail" * 50)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    (found,) = repair_run(path, check=True)
    assert before == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    (done,) = repair_run(path)
    assert done == found
    assert done.torn_bytes == 24
    assert (path / "rank-00000/records.jsonl.torn").read_bytes() == b'{"type":"record","seq":9'
    assert index.read_bytes().startswith(b"".join(kept))
    event = open_run(path).events()[-1]
    assert (event.kind, event.fields["torn_bytes"], event.fields["sealed"]) == ("repaired", 24, [segment.name])
    tensors = tensors_of(segment)
    orphans = [array for name, array in tensors.items() if name.startswith("__orphan")]
    assert sum(array.nbytes for array in orphans) == sum(done.orphans.values()) > 200
    assert bytes(orphans[-1]).endswith(b"tail" * 50)
    assert not repair_run(path)[0].needed


def test_repair_keeps_torn_lines_of_several_repairs(tmp_path: Path) -> None:
    path = toy(tmp_path / "run")
    for torn in (b"{one", b"{two", b"\xff\x00"):
        with (path / "rank-00000/records.jsonl").open("ab") as file:
            file.write(torn)
        repair_run(path)
    sides = sorted((path / "rank-00000").glob("*.torn*"))
    assert [side.read_bytes() for side in sides] == [b"{one", b"{two", b"\xff\x00"]


def test_repair_removes_empty_segments_and_reports_damaged_ones(tmp_path: Path) -> None:
    path = toy(tmp_path / "run")
    folder = path / "rank-00000"
    (folder / "seg-000001.safetensors").write_bytes((1000).to_bytes(8, "little") + b" " * 1000)
    (folder / "seg-000002.safetensors").write_bytes(b"")
    with (folder / "seg-000000.safetensors").open("r+b") as file:
        file.write(b"\xff" * 200)
    (done,) = repair_run(path)
    assert done.removed == ["seg-000001.safetensors", "seg-000002.safetensors"]
    assert done.sealed == []
    assert "its first bytes are damaged or missing" in done.problems[0]
    assert cli.main(["repair", str(path)]) == 1


def test_repair_names_a_truncated_payload_and_seals_the_rest(tmp_path: Path, capsys) -> None:
    path = toy(tmp_path / "run")
    unsealed_copy(path)
    segment = path / "rank-00000/seg-000000.safetensors"
    with open_run(path) as run:
        last = max(run.records, key=lambda rec: rec.entry.offset)
    os.truncate(segment, last.entry.offset + 3)
    assert cli.main(["repair", str(path)]) == 1
    assert f"the bytes of {last.key.tensor_name} end at" in capsys.readouterr().out
    assert "0.0.forward/layers.4:out#0" in tensors_of(segment)
    assert cli.main(["verify", str(path), "--json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (damage,) = [line for line in lines if line["type"] == "damage"]
    assert (damage["site"], damage["occurrence"]) == ("layers.0:out", 1)
    assert "truncated" in damage["reason"]


def test_repair_refuses_a_run_in_recording(tmp_path: Path, capsys) -> None:
    path = toy(tmp_path / "run")
    (path / "recorder.json").write_text("{}")
    with (path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunExistsError, match="is being recorded"):
            repair_run(path)
        assert cli.main(["repair", str(path), "--check"]) == 2
    assert "is being recorded; wait until its recorder ends" in capsys.readouterr().err
    other = tmp_path / "other"
    with RunFactory(other), pytest.raises(RunExistsError, match="is being recorded"):
        repair_run(other)  # no recorder's lock, but the writer's own


def test_repair_waits_for_a_recorder_that_nobody_can_join_any_more(tmp_path: Path, monkeypatch) -> None:
    """It has removed its address, and writes the record index of a closed run."""
    path, lock = toy(tmp_path / "run"), (tmp_path / "run/.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    monkeypatch.setattr(directory.time, "sleep", lambda seconds: lock.close())
    assert not any(repair.needed for repair in repair_run(path, check=True))
    assert lock.closed


def test_repair_removes_the_address_of_a_dead_recorder(tmp_path: Path, capsys) -> None:
    path = toy(tmp_path / "run")
    (path / "recorder.json").write_text("{}")
    assert cli.main(["repair", str(path)]) == 0
    assert capsys.readouterr().out == "nothing to repair\n"
    assert not (path / "recorder.json").exists()
    assert cli.main(["repair", str(tmp_path / "none")]) == 3


def test_writer_resumes_after_a_killed_writer(killed: tuple[Path, int]) -> None:
    path, _ = killed
    with pytest.raises(RunExistsError, match="already been written"):
        RankWriter(path, 0)
    num_records = len(open_run(path).records)
    writer = RankWriter(path, 0, resume=True)
    assert open_run(path).ledger().cut_off == [CUT_OFF]
    writer.event("open", rank=0)
    assert open_run(path).ledger().open_ranks == [0]
    from small_disk import lines_and_payloads

    writer.batch(*lines_and_payloads(num_records, [100] * 8))
    writer.event("close", never_fired=[])
    writer.close()
    with open_run(path) as run:
        assert run.problems == []
        assert [rec.seq for rec in run.records] == list(range(num_records + 8))
        assert all((run.array(rec) == rec.seq % 256).all() for rec in run.records)
        assert run.closed
        account = run.ledger()
        assert (account.lost_ranks, account.open_ranks) == ([], [])


def test_verify_of_a_complete_run_exits_0_and_counts(tmp_path: Path, capsys) -> None:
    path = toy(tmp_path / "run")
    assert cli.main(["verify", str(path)]) == 0
    out = capsys.readouterr().out
    assert "rank 0     6 seen, 0 dropped, 0 failed, 0 lost; on disk 6 records, 6 with values" in out
    assert "payloads   6 payloads match their recorded hash\n" in out
    assert out.endswith("complete   yes\n")
    assert cli.main(["verify", str(tmp_path / "none")]) == 3


def test_verify_reports_hashes_of_another_version_as_unchecked(tmp_path: Path, capsys) -> None:
    path = toy(tmp_path / "run")
    manifest = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(manifest | {"version": 1}))
    index = path / "rank-00000/records.jsonl"
    index.write_bytes(re.sub(rb'"hash":"....', b'"hash":"0000', index.read_bytes()))
    assert cli.main(["verify", str(path)]) == 0
    out = capsys.readouterr().out
    assert "6 payloads could be read; they have no recorded hash" in out
    assert "note       its hashes are of version 1, this tapscope knows 2: not checked\n" in out
    (path / "run.json").write_text(json.dumps(manifest | {"version": 2}))
    assert cli.main(["verify", str(path)]) == 1


def test_verify_names_every_damaged_record_in_json_and_the_first_few_in_text(tmp_path: Path, capsys) -> None:
    path = toy(tmp_path / "run")
    segment = path / "rank-00000/seg-000000.safetensors"
    content = bytearray(segment.read_bytes())
    for rec in open_run(path).records:
        content[rec.entry.offset] ^= 0x80
    segment.write_bytes(content)
    assert cli.main(["verify", str(path)]) == 1
    out = capsys.readouterr().out
    assert "payloads   6 of 6 payloads are missing or corrupt\n" in out
    assert "corrupt    layers.0:out at step 0, rank 0: its bytes have hash" in out
    assert "           and 1 more; --json lists all\n" in out
    assert cli.main(["verify", str(path), "--json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["type"] for line in lines] == ["run", "rank", *["damage"] * 6, "summary"]
    assert (lines[-1]["complete"], lines[-1]["num_damaged"], lines[1]["num_damaged"]) == (False, 6, 6)


def test_verify_reports_missing_records_by_rank(tmp_path: Path, capsys) -> None:
    path = tmp_path / "part"
    with RunFactory(path, mesh={"tp": 3}) as run:
        run.step()
        run.put("m:out", {0: np.ones(4), 1: np.ones(4)})
        for counts in run._counts.values():
            counts.dropped = 2
            counts.seen += 2
        run.end_step()
        run.writers[2].event("lost", reason="process 7 of rank 2 died", cause="died")
    for file in (path / "rank-00001").iterdir():
        file.unlink()
    (path / "rank-00001").rmdir()
    unsealed_copy(path)
    assert cli.main(["verify", str(path)]) == 1
    out, err = capsys.readouterr()
    assert "rank 0     3 seen, 2 dropped, 0 failed, 0 lost; on disk 1 records, 1 with values (32 B)\n" in out
    assert "missing    died while recording: rank 2\n" in out
    assert "missing    never connected: rank 1\n" in out
    assert "segments without a header (rank 0 seg-000000.safetensors)" in out
    assert err.endswith(f"next: tapscope repair {path}\n")
    assert cli.main(["verify", str(path), "--json"]) == 1
    ranks = [json.loads(line) for line in capsys.readouterr().out.splitlines()][1:3]
    assert [(rank["rank"], rank["dropped"], rank["unsealed"]) for rank in ranks] == [
        (0, 2, ["seg-000000.safetensors"]),
        (2, 2, []),
    ]


def test_verify_counts_unreferenced_bytes(tmp_path: Path) -> None:
    from tapscope.cli.verify import report_of

    path = toy(tmp_path / "run")
    index = path / "rank-00000/records.jsonl"
    kept = [line for line in index.read_bytes().splitlines(keepends=True) if b'"layers.4:out"' not in line]
    index.write_bytes(b"".join(kept))
    with open_run(path) as run:
        report = report_of(run)
    assert (report.ranks[0].orphan_bytes, report.ranks[0].ledger.lost, report.complete) == (60, 1, False)
    assert "60 payload bytes that no record names" in report.sentences()


def test_verify_reads_shared_bytes_once_and_checks_every_record(tmp_path: Path) -> None:
    from tapscope.cli.verify import report_of

    path = toy(tmp_path / "run")
    index = path / "rank-00000/records.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    first = next(line for line in lines if b'"layers.1:out"' in line)
    index.write_bytes(b"".join(lines) + first.replace(b'"seq":1', b'"seq":7').replace(b"layers.1", b"layers.7"))
    with open_run(path) as run:
        report = report_of(run)
    assert (report.ranks[0].num_hashed, report.ranks[0].num_with_values, report.damaged) == (7, 7, [])
    assert report.ranks[0].nbytes == sum((n + 1) * 12 for n in range(5)) + 64
