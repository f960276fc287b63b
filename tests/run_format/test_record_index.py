"""Record index: reading by index equals reading the lines, whatever became of either file."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tapscope.run_format import index_limits, record_index
from tapscope.run_format.compact import compact_run
from tapscope.run_format.index import RankIndex, read_index
from tapscope.run_format.writer import RankWriter
from tapscope.sources import open_run

LINES = "records.jsonl"
CLOSE = {"type": "event", "kind": "close"}


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_limits, "MIN_RECORDS", 1)


def record(seq: int, **more: Any) -> dict[str, Any]:
    stats = {"count": 4, "nan": 0, "posinf": 0, "neginf": 0, "zeros": 1, "subnormals": 0}
    stats |= {"min": -1.0, "max": 2.5, "absmax": 2.5, "sum": 1.5 + seq, "sumsq": 9.0}
    line = {"type": "record", "seq": seq, "site": f"layers.{seq % 3}:out", "step": seq // 3, "dtype": "float32"}
    line |= {
        "shape": [4],
        "hash": f"{seq:032x}",
        "bag": f"{seq:016x}",
        "stats": stats,
        "entry": ["s.bin", 16 * seq, 16],
    }
    return line | more


def encoded(lines: list[Any]) -> bytes:
    return b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)


OTHERS: list[Any] = [
    {"type": "site", "site": "layers.0:out", "class": "Linear", "params": {"weight": [4, 4]}},
    {"type": "step", "at": "begin", "step": 0, "phase": "decode", "time_ns": 0},
    {"type": "metric", "step": 0, "name": "loss", "value": 0.25},
    {"type": "event", "kind": "config", "step": 1},
    record(1000, tags={"note": "ü"}),
    record(1001, value={"type": "int", "value": 3}, dtype=None),
    record(1002, site="layers.ü:out"),
    record(1003, stats=None, hash=None, bag=None),
    record(1004, hash="XYZ"),
    record(2, dims="t"),
    b'{"type": "record", "seq": }\n',
    b"\xff\xfe not text\n",
    b"\n",
]


@st.composite
def runs(draw: st.DrawFn) -> list[Any]:
    """Lines of a run in random order."""
    count = draw(st.integers(1, 30))
    lines: list[Any] = [record(seq) for seq in range(count)]
    for other in draw(st.lists(st.sampled_from(OTHERS), max_size=8)):
        lines.insert(draw(st.integers(0, len(lines))), other)
    return lines


def plain(folder: Path) -> RankIndex:
    """What is read without an index."""
    found = folder / f"{LINES}{record_index.SUFFIX}"
    data = found.read_bytes() if found.exists() else None
    found.unlink(missing_ok=True)
    before, index_limits.MIN_RECORDS = index_limits.MIN_RECORDS, 1 << 60
    try:
        return read_index(folder, 0)
    finally:
        index_limits.MIN_RECORDS = before
        if data is not None:
            found.write_bytes(data)


def assert_same(one: RankIndex, two: RankIndex) -> None:
    assert list(one.records) == list(two.records)
    assert list(one.take_records()) == list(two.take_records())
    for name in ("sites", "begins", "ends", "lates", "metrics", "events", "problems"):
        assert getattr(one, name) == getattr(two, name), name


def index_of(folder: Path) -> Path:
    return folder / f"{LINES}{record_index.SUFFIX}"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=runs(), data=st.data())
def test_index_reads_what_the_lines_say(
    tmp_path_factory: pytest.TempPathFactory, lines: list[Any], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("rank")
    (folder / LINES).write_bytes(encoded([*lines, CLOSE]))
    expected = plain(folder)
    assert_same(read_index(folder, 0), expected)
    assert index_of(folder).exists()
    assert_same(read_index(folder, 0), plain(folder))  # by index
    if data.draw(st.booleans()):  # appended, the last line perhaps torn
        more = encoded([record(500 + i) for i in range(data.draw(st.integers(1, 4)))] + [OTHERS[4], CLOSE])
        with (folder / LINES).open("ab") as file:
            file.write(more[: len(more) - data.draw(st.integers(0, 60))])
    else:  # changed or cut off
        content = bytearray((folder / LINES).read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content = content[:at] if data.draw(st.booleans()) else content
        if at < len(content):
            content[at] ^= 1
        (folder / LINES).write_bytes(content)
    expected = plain(folder)
    assert_same(read_index(folder, 0), expected)
    assert_same(read_index(folder, 0), plain(folder))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_index_that_is_damaged_is_ignored(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("rank")
    (folder / LINES).write_bytes(encoded([OTHERS[0], *(record(seq) for seq in range(9)), OTHERS[4], CLOSE]))
    read_index(folder, 0)
    content = bytearray(index_of(folder).read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:at]
    else:
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    index_of(folder).write_bytes(content)
    assert record_index.read_record_index(folder / LINES, 0) is None
    assert_same(read_index(folder, 0), plain(folder))
    assert record_index.read_record_index(folder / LINES, 0) is not None  # replaced


@pytest.mark.parametrize("header", [b"", b"{}\n", b"[1]\n", b'{"version": 1, "size": -1}\n', b"\x00" * 99])
def test_index_of_something_else_is_ignored(tmp_path: Path, header: bytes) -> None:
    (tmp_path / LINES).write_bytes(encoded([record(0), CLOSE]))
    index_of(tmp_path).write_bytes(header)
    assert_same(read_index(tmp_path, 0), plain(tmp_path))


def test_index_is_not_written_into_a_run_in_progress_or_of_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / LINES).write_bytes(encoded([record(0), record(1)]))
    read_index(tmp_path, 0)
    assert os.listdir(tmp_path) == [LINES]
    (tmp_path / LINES).write_bytes(encoded([record(0), CLOSE])[:-3])  # torn
    read_index(tmp_path, 0)
    assert os.listdir(tmp_path) == [LINES]
    (tmp_path / LINES).write_bytes(encoded([record(0), CLOSE]))
    index_of(tmp_path).mkdir()  # cannot be replaced
    with caplog.at_level("DEBUG", "tapscope"):
        assert_same(read_index(tmp_path, 0), read_index(tmp_path, 0))
    assert "cannot write an index of" in caplog.text
    assert sorted(os.listdir(tmp_path)) == [LINES, index_of(tmp_path).name]


def test_index_has_the_permissions_of_the_lines(tmp_path: Path) -> None:
    (tmp_path / LINES).write_bytes(encoded([record(0), CLOSE]))
    (tmp_path / LINES).chmod(0o640)
    read_index(tmp_path, 0)
    assert index_of(tmp_path).stat().st_mode & 0o777 == 0o640


def test_index_is_removed_by_a_compaction(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "rank-00000"
    folder.mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text(json.dumps({"version": 2, "format": "tapscope-run", "world_size": 1}))
    (folder / LINES).write_bytes(encoded([*(record(seq, entry=None) for seq in range(5)), CLOSE]))
    with open_run(tmp_path / "run") as run:
        before = list(run.records)
    assert index_of(folder).exists()
    compact_run(tmp_path / "run")
    assert not index_of(folder).exists()
    with open_run(tmp_path / "run") as run:
        assert list(run.records) == before


def test_index_is_not_written_when_the_lines_change_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / LINES).write_bytes(encoded([record(0), CLOSE]))
    write = record_index.write_record_index

    def replace_first(path: Path, *args: Any) -> None:
        (tmp_path / "new").write_bytes(encoded([record(7), CLOSE, record(8), CLOSE]))
        os.replace(tmp_path / "new", path)
        write(path, *args)

    monkeypatch.setattr(record_index, "write_record_index", replace_first)
    with caplog.at_level("DEBUG", "tapscope"):
        read_index(tmp_path, 0)
    assert "the file changed while it was read" in caplog.text
    monkeypatch.undo()
    assert os.listdir(tmp_path) == [LINES]
    assert [found.seq for found in read_index(tmp_path, 0).records] == [7, 8]


def test_a_closed_writer_writes_the_index_of_many_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RankWriter(tmp_path, 0)
    writer.event("open", coords={}, mesh={})
    writer.batch([json.dumps(record(seq)).encode() for seq in range(9)], [])
    writer.event("close")
    writer.close()
    monkeypatch.setattr(index_limits, "MAX_AT_CLOSE", 10)
    writer.index()
    folder = tmp_path / "rank-00000"
    assert not index_of(folder).exists()
    monkeypatch.setattr(index_limits, "MAX_AT_CLOSE", 11)
    writer.index()
    found = record_index.read_record_index(folder / LINES, 0)
    assert found is not None
    assert [one.seq for one in found.records] == list(range(9))
