"""Equal recorded hashes are no equal values: what was not read is said, and read when it is asked for."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from factories import RunFactory
from sglang_dumps import SglangDump

from tapscope import cli
from tapscope.comparator import CompareOptions, compare
from tapscope.run_format.compact import compact_run
from tapscope.run_format.parquet import read_table, write_table
from tapscope.run_format.records import Records
from tapscope.sources import open_run


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    with RunFactory(tmp_path / "base") as run:
        for layer in range(3):
            run.site(f"layers.{layer}:out")
        run.step()
        for layer in range(3):
            run.put(f"layers.{layer}:out", np.arange(64, dtype=np.float32) + layer)
    shutil.copytree(tmp_path / "base", tmp_path / "target")
    return tmp_path / "base", tmp_path / "target"


def flip_payload(path: Path, site: str) -> None:
    with open_run(path) as run:
        (record,) = run.select([site])
    assert record.entry is not None
    file = path / "rank-00000" / record.entry.file
    data = bytearray(file.read_bytes())
    data[record.entry.offset + 17] ^= 4
    file.write_bytes(data)


def test_verify_reads_values_that_equal_hashes_skip(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    base, target = map(str, pair)
    assert cli.main(["diff", base, target]) == 0
    out = capsys.readouterr().out
    assert "every compared value is equal, by recorded hash; --verify reads them" in out
    assert "3 equal by recorded hash, unread" in out
    assert cli.main(["diff", base, target, "--verify"]) == 0
    out = capsys.readouterr().out
    assert "every compared value is equal\n" in out
    assert "unread" not in out


@pytest.mark.parametrize("side", [0, 1])
def test_unread_values_flipped_payload_is_damage_with_verify(
    pair: tuple[Path, Path], side: int, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_payload(pair[side], "layers.1:out")
    base, target = map(str, pair)
    assert cli.main(["diff", base, target]) == 0
    assert cli.main(["diff", base, target, "--verify"]) == 3
    out = capsys.readouterr().out
    assert f"{pair[side].name} is damaged" in out
    assert "layers.1:out at step 0 differ from those recorded" in out
    report = compare(base, target, CompareOptions(verify=True, allow_partial=True))
    assert report.exit_code == 0
    assert report.coverage.num_sites_matched == 2


def test_unread_values_flipped_payload_of_a_dump_is_not_a_culprit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("base", "target"):
        dump = SglangDump(tmp_path / name)
        dump.step(input_ids=[5, 6])
        dump.dump("t", torch.arange(64.0))
        dump.dump("u", torch.arange(6.0))
    (file,) = (tmp_path / "target").glob("*name=t*")
    data = bytearray(file.read_bytes())
    data[data.index(np.arange(64, dtype=np.float32).tobytes()) + 18] ^= 64
    file.write_bytes(data)
    assert cli.main(["diff", str(tmp_path / "base"), str(tmp_path / "target")]) == 3
    assert "do not have the CRC-32 that their file says" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["lines", "table", "table without a checksum"])
def test_unread_values_damaged_record_name_never_agrees(
    pair: tuple[Path, Path], form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base, target = pair
    folder = target / "rank-00000"
    if form == "lines":
        file = folder / "records.jsonl"
        old = b'"record","seq":1,"site":"layers.1'
        assert file.read_bytes().count(old) == 1
        file.write_bytes(file.read_bytes().replace(old, b'"record","seq":1,"site":"layers.9'))
    else:
        compact_run(target)
        found = list(read_table(folder / "records.parquet", 0))
        found[1] = found[1]._replace(key=found[1].key._replace(site="layers.9:out"))
        write_table(Records(found), [], folder / "records.parquet")
    if form == "table without a checksum":
        lines = [json.loads(line) for line in (folder / "records.jsonl").read_bytes().splitlines()]
        for line in lines:
            line.pop("crc32", None)
        (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cli.main(["diff", str(base), str(target)]) == 1
    out = capsys.readouterr().out
    assert "the data are partial" in out
    assert "records of 1 site that no line declares, e.g. 'layers.9:out'" in out
    assert cli.main(["verify", str(target)]) == 1
