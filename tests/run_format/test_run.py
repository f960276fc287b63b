import json
import math
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from factories import RunFactory
from hypothesis import given
from hypothesis import strategies as st
from run_records import _records
from safetensors import safe_open

from tapscope.core import dtypes, wire
from tapscope.core.errors import (
    DataError,
    RecorderError,
    RuleError,
    RunCorruptError,
    RunExistsError,
    RunNotFoundError,
    RunVersionError,
)
from tapscope.core.observe import RowSpan, StepInfo
from tapscope.core.wire import Message
from tapscope.run_format import record
from tapscope.run_format.directory import clear_run
from tapscope.run_format.ledger import StepCounts, StepLine, begin_line, encode_line, late_line, step_from_lines
from tapscope.run_format.record import Entry, Key, Record, Slice, Stats
from tapscope.run_format.segment import SegmentWriter
from tapscope.run_format.writer import RankWriter
from tapscope.sources import open_run


@given(_records)
def test_record_round_trips_through_its_line(item: Record) -> None:
    if item.dtype is None:
        item = Record(item.key, item.seq, None, (), value=item.value)
    assert record.from_json(json.loads(record.encode(item)), rank=3) == item


def test_record_line_equals_the_documented_line() -> None:
    stats = Stats(6, 0, 1, 0, 2, 0, -1.0, 2.5, 2.5, 3.0, 9.25)
    item = Record(
        Key("mlp:out", 4, 1, 2, 3, "recompute", "draft"),
        7,
        "bfloat16",
        (2, 3),
        "t h[tp]",
        ((0, 2),),
        stats,
        "ab" * 16,
        "cd" * 8,
        Entry("s", 64, 12),
        slice=Slice((0, 4, 2), (9, 3)),
        tags={"layer_id": 3},
    )
    assert record.encode(item).decode() == (
        '{"type":"record","seq":7,"site":"mlp:out","step":4,"occurrence":2,"micro":3,"pass":"recompute",'
        '"model":"draft","dtype":"bfloat16","shape":[2,3],"dims":"t h[tp]","rows":[[0,2]],'
        '"slice":{"rows":[0,4,2],"shape":[9,3]},"tags":{"layer_id":3},'
        '"hash":"abababababababababababababababab","bag":"cdcdcdcdcdcdcdcd",'
        '"stats":{"count":6,"nan":0,"posinf":1,"neginf":0,"zeros":2,"subnormals":0,"min":-1.0,"max":2.5,'
        '"absmax":2.5,"sum":3.0,"sumsq":9.25},"entry":["s",64,12]}'
    )
    capped = Record(Key("a:out", 0), 0, "float32", (512,), cap=1024, value={"type": "int", "value": 3}, hash="0")
    assert record.encode(capped).decode() == (
        '{"type":"record","seq":0,"site":"a:out","step":0,"dtype":"float32","shape":[512],"cap":1024,'
        '"value":{"type":"int","value":3},"hash":"0"}'
    )


def test_record_overflowed_sum_is_null_on_disk_and_infinite_in_memory() -> None:
    item = Record(
        Key("a:out", 0), 0, "float64", (1,), stats=Stats(1, 0, 0, 0, 0, 0, 1e300, 1e300, 1e300, 1e300, math.inf)
    )
    line = json.loads(record.encode(item))
    assert line["stats"]["sumsq"] is None
    again = record.from_json(line, 0)
    assert again.stats is not None
    assert again.stats.sumsq == math.inf


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=40), st.integers(1, 39))
def test_statistics_of_shards_merge_into_those_of_the_whole(values: list[float], cut: int) -> None:
    def stats(part: np.ndarray) -> Stats:
        low, high = float(part.min()), float(part.max())
        zeros = int((part == 0).sum())
        total, squares = float(part.sum()), float((part**2).sum())
        return Stats(part.size, 0, 0, 0, zeros, 0, low, high, float(abs(part).max()), total, squares)

    whole = np.array(values)
    cut = min(cut, whole.size - 1)
    merged = stats(whole[:cut]).merge(stats(whole[cut:]))
    expected = stats(whole)
    assert merged.count == expected.count
    assert (merged.min, merged.max, merged.absmax) == (expected.min, expected.max, expected.absmax)
    assert merged.sum == pytest.approx(expected.sum, abs=1e-9)
    assert merged.sumsq == pytest.approx(expected.sumsq)
    assert merged.rms == pytest.approx(math.sqrt(float((whole**2).mean())))


@pytest.mark.parametrize("name", dtypes.NAMES)
def test_run_round_trips_every_dtype(tmp_path: Path, name: str) -> None:
    raw = np.arange(96, dtype=np.uint8)
    array = (
        raw.view(dtypes.numpy_dtype(name)).reshape(2, -1) if name != "bool" else (raw % 2).astype(bool).reshape(2, -1)
    )
    with RunFactory(tmp_path / "run") as run:
        run.step()
        run.put("a:out", array)
    with open_run(tmp_path / "run") as opened:
        assert opened.records[0].dtype == name
        np.testing.assert_array_equal(opened.array(opened.records[0]).view(np.uint8), array.view(np.uint8))


def test_sealed_segments_are_valid_safetensors_files(tmp_path: Path) -> None:
    values = np.linspace(-3, 3, 35, dtype=np.float32).reshape(5, 7)
    with RunFactory(tmp_path / "run") as run:
        run.step()
        run.put("layers.0.mlp:out", values)
        run.put("layers.0.mlp:out", values.astype(ml_dtypes.bfloat16))
    with safe_open(tmp_path / "run/rank-00000/seg-000000.safetensors", "pt") as file:
        names = [name for name in file.keys() if not name.startswith("__pad")]  # noqa: SIM118 - no mapping
        assert names == ["0.0.forward/layers.0.mlp:out#0", "0.0.forward/layers.0.mlp:out#1"]
        np.testing.assert_array_equal(file.get_tensor(names[0]).numpy(), values)


def test_segment_is_sealed_when_its_size_or_header_is_full(tmp_path: Path) -> None:
    small = RankWriter(tmp_path, 0, segment_bytes=1000)
    for n in range(5):
        small.record(b'{"n":0}', f"t{n}", "uint8", [400], bytes(400))
    small.close()
    assert len(list((tmp_path / "rank-00000").glob("seg-*"))) == 3
    segment = SegmentWriter(tmp_path / "seg", header_bytes=4096)
    written = 0
    while segment.place(f"tensor-{written}", "uint8", [3], b"abc") is not None:
        written += 1
    segment.flush()
    segment.seal()
    assert written > 5
    with safe_open(tmp_path / "seg", "np") as file:
        assert bytes(file.get_tensor(f"tensor-{written - 1}")) == b"abc"


def test_writer_refuses_a_second_writer_of_a_rank(tmp_path: Path) -> None:
    first = RankWriter(tmp_path, 0)
    with pytest.raises(RunExistsError, match="rank 0"):
        RankWriter(tmp_path, 0)
    first.lines(b"{}\n")
    first.close()
    with pytest.raises(RunExistsError, match="already been written"):
        RankWriter(tmp_path, 0)


def _toy(path: Path) -> Path:
    with RunFactory(path, mesh={"tp": 2}) as run:
        rows = [RowSpan("a", 0, 3, 0, 0), RowSpan("b", 0, 2, 0, 3)]
        run.step(grid=(5,), rows=rows, token_ids=[1, 2, 3, 7, 8])
        run.put("layers.0.mlp:out", {0: np.ones((5, 2), np.float32), 1: np.zeros((5, 2), np.float32)}, dims="t h[tp]")
        decode = [RowSpan("a", 3, 1, 0, 0), RowSpan("b", 2, 1, 0, 1)]
        run.step(phase="decode", grid=(2,), rows=decode, token_ids=[4, 9])
        run.put("layers.1.mlp:out", np.ones((2, 2), np.float32))
    return path


def test_run_has_tokens_steps_and_ranks(tmp_path: Path) -> None:
    run = open_run(_toy(tmp_path / "run"))
    assert run.tokens() == {"a": {0: 1, 1: 2, 2: 3, 3: 4}, "b": {0: 7, 1: 8, 2: 9}}
    assert run.prompts() == {"a": [1, 2, 3], "b": [7, 8]}
    assert (run.ranks, run.mesh, run.coords(1)) == ((0, 1), {"tp": 2}, {"tp": 1})
    assert run.steps[1][0].info.phase == "decode"
    assert run.ledger().complete
    assert run.closed


def test_run_select_filters_by_site_layer_step_and_rank(tmp_path: Path) -> None:
    run = open_run(_toy(tmp_path / "run"))
    assert len(run.select()) == 3
    assert len(run.select(["mlp:out"], layers=[0])) == 2
    assert run.select("mlp:out", layers=[0]) == run.select(["mlp:out"], layers=[0])
    assert len(run.select(ranks=[1])) == 1
    assert len(run.select(skip=["layers.0.*"])) == 1
    assert run.select(steps=[7]) == []


def test_run_select_without_a_match_suggests_sites(tmp_path: Path) -> None:
    run = open_run(_toy(tmp_path / "run"))
    with pytest.raises(RuleError, match=r"no site matches 'layers.99.\*' in .*; layers are 0-1"):
        run.select(["layers.99.*"])


def test_open_distinguishes_missing_run_file_and_foreign_directory(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match="does not exist"):
        open_run(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunNotFoundError, match="is a file"):
        open_run(tmp_path / "file")
    (tmp_path / "dir").mkdir()
    with pytest.raises(RunNotFoundError, match="it is empty; capture a run with"):
        open_run(tmp_path / "dir")
    (tmp_path / "dir/other.txt").write_text("x")
    with pytest.raises(RunNotFoundError, match=r"contains no run\.json"):
        open_run(tmp_path / "dir")
    (tmp_path / "dir/run.json").write_text("{}")
    with pytest.raises(RunCorruptError, match="is not the manifest"):
        open_run(tmp_path / "dir")
    (tmp_path / "dir/run.json").write_text("{")
    with pytest.raises(RunCorruptError, match="cannot be read"):
        open_run(tmp_path / "dir")


def test_open_refuses_a_newer_format_with_both_versions(tmp_path: Path) -> None:
    path = _toy(tmp_path / "run")
    manifest = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(manifest | {"version": 4}))
    with pytest.raises(RunVersionError, match="version 4; this tapscope reads up to 3"):
        open_run(path)


def test_run_truncated_segment_names_file_and_bytes(tmp_path: Path) -> None:
    path = _toy(tmp_path / "run")
    segment = path / "rank-00000/seg-000000.safetensors"
    with segment.open("r+b") as file:
        file.truncate(131072 + 8)
    run = open_run(path)
    with pytest.raises(RunCorruptError, match=r"seg-000000.safetensors: truncated: 131080 bytes, a record needs"):
        run.array(run.records[0])


def test_run_reports_torn_and_damaged_lines_and_reads_the_rest(tmp_path: Path) -> None:
    path = _toy(tmp_path / "run")
    index = path / "rank-00001/records.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join([*lines[:1], b"{broken\n", *lines[1:]])[:-9])
    run = open_run(path)
    assert len(run.records) == 3
    assert any(":2: unreadable line" in problem for problem in run.problems)
    assert any("cut off" in problem for problem in run.problems)
    account = run.ledger()
    assert not account.complete
    assert account.open_ranks == [1]
    assert account.uneven_ranks == []


def test_completeness_counts_records_lost_between_hook_and_disk(tmp_path: Path) -> None:
    path = _toy(tmp_path / "run")
    index = path / "rank-00000/records.jsonl"
    kept = [line for line in index.read_text().splitlines(keepends=True) if '"layers.1.mlp:out","step"' not in line]
    index.write_text("".join(kept))
    account = open_run(path).ledger()
    assert (account.lost, account.complete) == (1, False)
    assert "1 values lost between hook and disk" in account.sentences()


def test_completeness_reports_only_known_dead_ranks(tmp_path: Path) -> None:
    with RunFactory(tmp_path / "run", mesh={"tp": 3}) as run:
        run.step()
        run.put("m:out", {rank: np.ones(4) for rank in range(3)})
        run.end_step()
        run.writers[0].event("lost", reason="process 7 died", cause="died")
        run.writers[1].event("lost", reason="no space left on device", cause="disk")
        run.writers[2].event("lost")
    account = open_run(tmp_path / "run").ledger()
    assert account.lost_ranks == [0]
    assert [sentence.rpartition(": ")[2] for sentence in account.cut_off] == [
        "no space left on device",
        "the reason was not recorded",
    ]
    assert "died while recording: rank 0" in account.sentences()


def test_completeness_counts_values_that_arrive_after_their_step(tmp_path: Path) -> None:
    with RunFactory(tmp_path / "run") as run:
        run.step()
        run.put("a:out", np.ones(3, np.float32))
        run.step()
        run.put("a:out.grad", np.ones(3, np.float32))
        run._counts[0] = StepCounts()  # the gradient belongs to step 0, which has ended
        index = run.path / "rank-00000/records.jsonl"
        index.write_bytes(index.read_bytes().replace(b'"a:out.grad","step":1', b'"a:out.grad","step":0'))
        run.writers[0].line(late_line(0, StepCounts(seen=3, sent=2, dropped=1)))
        run.writers[0].line(late_line(0, StepCounts(seen=1, failed=1)))
    opened = open_run(tmp_path / "run")
    assert opened.steps[0][0].counts == StepCounts(5, 3, 1, 1)
    account = opened.ledger()
    assert (account.seen, account.recorded, account.dropped, account.failed, account.lost) == (5, 2, 1, 1, 1)


def test_step_marked_by_the_host_is_recorded(tmp_path: Path) -> None:
    info = StepInfo(step=3, phase="decode", kind="warmup")
    line = json.loads(encode_line(begin_line(info, 2, skipped=True)))
    assert (line["kind"], line["skipped"]) == ("warmup", True)
    assert step_from_lines(line, None) == StepLine(info, 2, None, True)
    plain = begin_line(StepInfo(step=3), 0)
    assert not {"kind", "skipped"} & set(plain)


def test_site_line_may_have_parent_and_dims(tmp_path: Path) -> None:
    with RunFactory(tmp_path / "run") as run:
        line = {"type": "site", "site": "a:out", "class": "Linear", "params": {"weight": [2, 3]}}
        run.writers[0].line(line)
        run.writers[0].line({**line, "site": "b:out", "parent": "MLP", "dims": "t h"})
        run.writers[0].line({**line, "site": "c:out", "no_inputs": True})
        for says_so in (True, False):  # of another configuration, in which its module was called with tensors
            run.writers[0].line({**line, "site": "d:out", "no_inputs": says_so})
    sites = open_run(tmp_path / "run").sites
    assert (sites["a:out"].parent, sites["a:out"].dims) == (None, None)
    assert (sites["b:out"].parent, sites["b:out"].dims) == ("MLP", "t h")
    assert [name for name, site in sites.items() if site.no_inputs] == ["c:out"]


def test_completeness_reports_skipped_steps_budgets_and_every_loss(tmp_path: Path) -> None:
    with RunFactory(tmp_path / "run") as run:
        writer = run.writers[0]
        run.step()
        run.put("a:out", np.ones(3, np.float32))
        run.put("a:out", np.ones(3, np.float32))
        run._counts[0].seen -= 1  # one record more than counted
        run.step()
        run._counts[0].seen += 1  # one less
        run.end_step()
        writer.line(begin_line(StepInfo(step=5, kind="dummy"), 0, skipped=True))
        writer.event("budget", limit="max_bytes", value=1000, step=6)
    account = open_run(tmp_path / "run").ledger()
    assert (account.lost, account.seen, account.recorded) == (1, 2, 2)
    assert (account.skipped_steps, account.unfinished_steps) == ([(0, 5)], [])
    assert "a budget ended the capture: rank 0: max_bytes 1000 was reached at step 6" in account.sentences()
    assert "warm-up or dummy steps skipped (rank, step): (0, 5)" in account.sentences()
    assert not account.complete


def test_run_hostile_index_lines_reach_no_other_file(tmp_path: Path) -> None:
    path = _toy(tmp_path / "run")
    (tmp_path / "secret").write_bytes(bytes(1 << 18))
    index = path / "rank-00000/records.jsonl"
    line = {"type": "record", "seq": 50, "site": "a:out", "step": 0, "dtype": "uint8", "shape": [8]}
    entries = (["../../secret", 0, 8], ["seg-000000.safetensors", -9, 8], ["seg-000000.safetensors", 0, 10**18])
    with index.open("a") as file:
        for n, entry in enumerate(entries):
            file.write(json.dumps({**line, "seq": 50 + n, "entry": entry}) + "\n")
        file.write(json.dumps({**line, "seq": 60, "shape": [-2, -4], "entry": entries[1]}) + "\n")
        file.write("[" * 100_000 + "\n")
        file.write(json.dumps({**line, "site": 5}) + "\n")
        file.write(json.dumps({**line, "entry": [1, 2, 3]}) + "\n")
    run = open_run(path)
    assert sum("unreadable line" in problem for problem in run.problems) == 4
    hostile = [rec for rec in run.records if rec.seq >= 50]
    assert len(hostile) == 3
    for rec in hostile:
        with pytest.raises(RunCorruptError):
            run.array(rec)


def test_run_reads_version_1(tmp_path: Path) -> None:
    path = _toy(tmp_path / "run")
    manifest = json.loads((path / "run.json").read_text())
    assert manifest["version"] == 3
    (path / "run.json").write_text(json.dumps(manifest | {"version": 1}))
    assert len(open_run(path).records) == 3


def test_run_values_not_recorded_are_an_error(tmp_path: Path) -> None:
    with RunFactory(tmp_path / "run") as run:
        run.step()
        run.put("a:out", np.ones(3, np.float32), keep="stats")
    opened = open_run(tmp_path / "run")
    with pytest.raises(DataError, match="statistics only"):
        opened.array(opened.records[0])


def test_run_array_of_a_site_is_that_of_its_only_record(tmp_path: Path) -> None:
    with RunFactory(tmp_path / "run") as run:
        run.step()
        run.put("a:out", np.ones(3, np.float32))
        run.put("b:out", np.zeros(2, np.float32))
        run.step()
        run.put("b:out", np.ones(2, np.float32))
    opened = open_run(tmp_path / "run")
    assert opened.array("a:out").tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(RuleError, match=r"2 records of .* match 'b:out' \(steps 0 to 1\): choose one, e.g. run.array"):
        opened.array("b:out")
    assert opened.array(opened.select("b:out", steps=[1])[0]).tolist() == [1.0, 1.0]  # as the sentence says
    with pytest.raises(RuleError, match="no site matches 'c:out'"):
        opened.array("c:out")


def test_replace_accepts_only_a_proven_run(tmp_path: Path) -> None:
    path = _toy(tmp_path / "run")
    with pytest.raises(RunExistsError, match="--force"):
        clear_run(path, force=False)
    (path / "notes.txt").write_text("mine")
    clear_run(path, force=True)
    assert [entry.name for entry in path.iterdir()] == ["notes.txt"]
    with pytest.raises(RunExistsError, match="not a tapscope run"):
        clear_run(path, force=True)


def test_message_round_trips_through_frames() -> None:
    message = wire.decode(wire.encode(Message("batch", {"n": 3, "ü": [1, None]}, [b"abc", b""])))
    assert (message.kind, message.fields, list(message.frames)) == ("batch", {"n": 3, "ü": [1, None]}, [b"abc", b""])
    assert wire.encode(Message("ack", {"n": 1})) == [b'{"tapscope":1,"kind":"ack","n":1}']


@given(st.lists(st.binary(max_size=60), max_size=3))
def test_message_random_bytes_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(RecorderError):
        wire.decode(frames)


def test_message_of_another_version_is_refused_by_name() -> None:
    with pytest.raises(RecorderError, match="version 2; this tapscope speaks 1"):
        wire.decode([b'{"tapscope":2,"kind":"hello"}'])


def test_open_reports_missing_and_truncated_payloads(tmp_path: Path) -> None:
    path = _toy(tmp_path / "run")
    (path / "rank-00001/seg-000000.safetensors").unlink()
    os.truncate(path / "rank-00000/seg-000000.safetensors", 131072 + 8)
    account = open_run(path).ledger()
    assert not account.complete
    assert any("rank-00001/seg-000000.safetensors: missing" in sentence for sentence in account.sentences())
    assert any("truncated: 131080 bytes, its records need" in sentence for sentence in account.sentences())


def test_run_table_is_typed(tmp_path: Path) -> None:
    table = open_run(_toy(tmp_path / "run")).table()
    assert table.select("rank", "step", "layer", "rms").rows() == [(0, 0, 0, 1.0), (0, 1, 1, 1.0), (1, 0, 0, 0.0)]
    assert table["shape"].to_list() == [[5, 2], [2, 2], [5, 2]]
    assert open_run(tmp_path / "run").table().filter(table["nonfinite"] > 0).is_empty()
