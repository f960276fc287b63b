"""Blocks of records: the recorder makes the same lines and payloads of them as the rank would."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tapscope.core.errors import RecorderError
from tapscope.dumper import Dumper
from tapscope.dumper.records import replay_plan
from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.records.record_layout import RecordLayout
from tapscope.dumper.records.replay_plan import LearnedRecord, ReplayPlan
from tapscope.dumper.records.sketcher import SKETCH_LAYOUT, SketchCopy
from tapscope.dumper.transport.packed_rows import (
    MAX_TABLES,
    LineTable,
    ReceivedTables,
    SentTables,
    can_unpack,
)
from tapscope.run_format.directory import create_run
from tapscope.run_format.writer import PackedPayloads, RankWriter
from tapscope.sources import open_run

pytestmark = pytest.mark.skipif(not can_unpack(), reason="needs the C++ library")
VALUE = RecordLayout(',"dtype":"float32","shape":[2,8]', "float32", [2, 8], 16, 64)


def memory_of_replay() -> Any:
    """As taps leave it: an argument, statistics alone, statistics with a sketch, and two equal values."""
    memory = np.zeros(2048 // 8, np.int64)
    generator = np.random.default_rng(0)
    for place in (256, 384):
        row = memory[place // 8 :][:16]
        row[[0, 6]], row[12:15] = 16, generator.integers(1 << 62, size=3)
        row.view(np.float64)[7:12] = generator.normal(size=5)
    memory.view(np.float32)[(384 + 128) // 4 :][:256] = generator.normal(size=256)
    memory.view(np.float32)[1536 // 4 :][:16] = memory.view(np.float32)[1792 // 4 :][:16] = generator.normal(size=16)
    return memory


def plan_of_replay() -> ReplayPlan:
    def record(site: str, layout: RecordLayout, content: bytes = b"", copy: Any = None) -> Any:
        port = SimpleNamespace(site=site, site_text=json.dumps(site), model="", model_text="")
        stored = layout if copy is None else SKETCH_LAYOUT
        return SimpleNamespace(port=port, layout=layout, stored=stored, content=content, pending_copy=copy)

    copy = SketchCopy(lambda slot: None)
    copy.place = 128
    return ReplayPlan(
        [
            LearnedRecord(record("a:out", VALUE), 256),
            LearnedRecord(record("b:out", VALUE, copy=copy), 384, has_bytes=True),
            LearnedRecord(record("b:in", RecordLayout("", "", [], 0, 0), b'"value":{"type":"int","value":3}'), -1),
            LearnedRecord(record("c:out", VALUE), 1536, has_bytes=True),
            LearnedRecord(record("d:out", VALUE), 1792, has_bytes=True),
        ]
    )


def packed(plan: ReplayPlan, memory: Any) -> tuple[Any, Any]:
    room = np.zeros(plan.block_bytes, np.uint8)
    rows, digests = plan.pack("4", 11, PayloadSlot(room.ctypes.data, room.nbytes, -1, room), memory.ctypes.data)
    assert digests == b""
    return rows, room


@pytest.mark.parametrize("quick_bytes", [0, 1 << 20])
def test_block_of_packed_rows_is_a_copy_of_the_memory(monkeypatch: pytest.MonkeyPatch, quick_bytes: int) -> None:
    """With and without the GIL, which small ones keep."""
    monkeypatch.setattr(replay_plan, "_QUICK_BYTES", quick_bytes)
    memory, plan = memory_of_replay(), plan_of_replay()
    _, room = packed(plan, memory)
    assert room.tobytes() == memory.tobytes()[256 : 256 + plan.block_bytes]


def test_packed_rows_are_unpacked_to_the_lines_and_payloads_of_the_rank() -> None:
    memory, plan = memory_of_replay(), plan_of_replay()
    slots = [np.zeros(nbytes, np.uint8) for nbytes in (1024, 64, 64)]
    given = [PayloadSlot(each.ctypes.data, each.nbytes, -1, each) for each in slots]
    expected, _ = plan.lines("4", 11, given, memory.ctypes.data)
    rows, room = packed(plan, memory)
    sent, received = SentTables(), ReceivedTables()
    fields = {"blocks": [[1, sent.number_of(rows.table), rows.step, rows.number, 1, True]]} | sent.take_changes()
    other = (0, 7, "x", "uint8", [1], b"!")
    found = received.unpack(
        json.loads(json.dumps(fields)), [b"before", b"after"], [other, (1, None, "", "uint8", [1], room)]
    )
    assert (found.lines[0], found.lines[-1]) == (b"before", b"after")
    assert [json.loads(line) for line in found.lines[1:-1]] == [json.loads(line) for line in expected.split(b"\n")]
    assert found.payloads[0] is other
    ((line, own, name, dtype, shape, content),) = found.payloads[1:]
    assert (line, name, dtype, list(shape)) == (4, "4.0.forward/c:out#0", "float32", [2, 8])
    assert bytes(content) == slots[1].tobytes()
    assert found.shared == [(5, own)]  # d:out has the bytes of c:out
    assert found.packed == [PackedPayloads([2], ["4.0.forward/b:out#0"], "float32", (256,), slots[0].tobytes(), [])]

    again = {"blocks": [[0, sent.number_of(rows.table), "5", 16, 0, False]]} | sent.take_changes()
    assert "tables" not in again
    bare = received.unpack(again, [], [(0, None, "", "uint8", [1], room)])
    assert [json.loads(line)["step"] for line in bare.lines] == [5] * 5
    assert b"sketch" not in b"".join(bare.lines)
    assert [payload[0] for payload in bare.payloads] == [3]
    assert bare.packed == []


def test_equal_sketches_of_a_block_are_stored_once(tmp_path: Path) -> None:
    memory = np.zeros(6 * 1152, np.uint8)
    counters = memory.reshape(6, 1152)[:, 128:].view(np.float32)
    counters[:] = np.random.default_rng(0).normal(size=(6, 256))
    counters[4], counters[5] = counters[1], counters[0]
    copy: Any = SketchCopy(lambda slot: None)
    copy.place = 128
    learned = []
    for n in range(6):
        port = SimpleNamespace(site=f"{n}:out", site_text=f'"{n}:out"', model="m", model_text=',"model":"m"')
        record: Any = SimpleNamespace(port=port, layout=VALUE, stored=SKETCH_LAYOUT, content=b"", pending_copy=copy)
        learned.append(LearnedRecord(record, 1152 * n, has_bytes=True))
    rows, room = packed(ReplayPlan(learned), memory)
    sent, received = SentTables(), ReceivedTables()
    fields = {"blocks": [[0, sent.number_of(rows.table), "4", 0, 0, True]]} | sent.take_changes()
    found = received.unpack(json.loads(json.dumps(fields)), [], [(0, 0, "", "uint8", [1], room)])
    assert found.payloads == []
    assert [(row.lines, row.shared) for row in found.packed] == [([0, 1, 2, 3], [(4, 1), (5, 0)])]
    create_run(tmp_path / "run", {"world_size": 1})
    writer = RankWriter(tmp_path / "run", 0)
    writer.batch(found.lines, found.payloads, found.shared, 0, found.packed)
    writer.batch([], [], (), 1)
    writer.close()
    run = open_run(tmp_path / "run")
    entries = [record.sketch.entry for record in run.records if record.sketch is not None]
    assert entries[4:] == [entries[1], entries[0]]
    for record, wanted in zip(run.records, counters, strict=True):
        np.testing.assert_array_equal(run.sketch(record), wanted)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": [1848, -1, -1, -1, -1]},
        {"rows": [-128, -1, -1, -1, -1]},
        {"rows": [4, -1, -1, -1, -1]},
        {"rows": [0]},
        {"heads": []},
        {"heads": None},
        {"nbytes": "many"},
        {"values": [[9, "a:out", "", "float32", [16], 0, False]]},
        {"values": [[0, "a:out", "", "float32", [1 << 60], 0, False]]},
        {"values": [[0, "a:out", "", "float32", [-1], 0, False]]},
        {"values": [[0, "a:out", "", "text", [1], 0, False]]},
        {"values": [[0, "a:out", "", "float32", [8], 0, True]]},
        {"values": [[0, "a:out"]]},
        {"values": [[0, "a:out", "", "float32", [1], 0, False]] * 2},
    ],
)
def test_packed_rows_refuse_tables_that_do_not_fit(change: dict[str, Any]) -> None:
    fields = json.loads(json.dumps(packed(plan_of_replay(), memory_of_replay())[0].table.to_json()))
    assert LineTable.from_json(fields).nbytes == 1600
    with pytest.raises(RecorderError):
        LineTable.from_json(fields | change)


def test_packed_rows_refuse_blocks_of_unknown_tables_and_other_sizes() -> None:
    rows, room = packed(plan_of_replay(), memory_of_replay())
    sent, received = SentTables(), ReceivedTables()
    fields = {"blocks": [[0, sent.number_of(rows.table), "4", 1, 0, True]]}
    with pytest.raises(RecorderError, match="was not sent"):
        received.unpack(fields, [], [(0, None, "", "uint8", [1], room)])
    with pytest.raises(RecorderError, match="1599 bytes"):
        received.unpack(fields | sent.take_changes(), [], [(0, None, "", "uint8", [1], room[:-1])])
    broken = LineTable((b"\n",), (b"",), (-1,), (), 0)
    with pytest.raises(RecorderError, match="line break"):
        received.unpack(
            {"tables": {5: broken.to_json()}, "blocks": [[0, 5, "4", 1, 0, True]]},
            [],
            [(0, None, "", "uint8", [1], room)],
        )


def test_sent_tables_forget_the_one_that_was_not_used_for_longest() -> None:
    sent = SentTables()
    tables = [LineTable((b"",), (b"",), (-1,), (), 0) for _ in range(MAX_TABLES + 1)]
    numbers = [sent.number_of(table) for table in tables[:MAX_TABLES]]
    assert sent.number_of(tables[0]) == numbers[0]
    assert list(sent.take_changes()) == ["tables"]
    assert sent.number_of(tables[MAX_TABLES]) == MAX_TABLES
    changes = sent.take_changes()
    assert (list(changes["tables"]), changes["forget"]) == ([MAX_TABLES], [numbers[1]])
    assert sent.number_of(tables[1]) == MAX_TABLES + 1  # sent again


@pytest.mark.parametrize("shm_bytes", [0, 1 << 20])
def test_replays_are_recorded_as_blocks_and_as_lines_alike(tmp_path: Path, shm_bytes: int) -> None:
    memory = memory_of_replay()
    handle = SimpleNamespace(address=memory.ctypes.data, held_bytes=0, is_last=False, ran_out=False, wait=lambda: None)
    fetch: Any = SimpleNamespace(whole=lambda: handle)
    model, runs = nn.Sequential(nn.Identity()), []
    for name in ("blocks", "lines"):
        with Dumper(model, tmp_path / name, keep="off", rules=["0:out=full"], shm_bytes=shm_bytes) as dumper:
            model(torch.ones(2))  # the recorder has answered
            dumper.flush()
            recording = dumper._recording
            assert recording is not None
            collector, plan = recording.collector, plan_of_replay()
            assert collector.capturer._queue.takes_blocks
            collector.capturer._queue.takes_blocks = name == "blocks"
            for _ in range(3):
                with dumper.step():
                    firing = collector.shared_firing()
                    assert firing is not None
                    collector.put_replay(plan, firing, fetch)
        runs.append(open_run(tmp_path / name))
        assert runs[-1].ledger().complete
    values = [
        [(r.key, r.hash, r.stats, r.dtype, r.sketch and r.sketch[:2], r.entry and r.entry.nbytes) for r in run.records]
        for run in runs
    ]
    assert len(values[0]) == 1 + 3 * 5
    assert values[0] == values[1]
    for first, second in zip(*(run.records for run in runs), strict=True):
        if first.sketch is not None:
            np.testing.assert_array_equal(runs[0].sketch(first), runs[1].sketch(second))
        elif first.entry is not None:
            np.testing.assert_array_equal(runs[0].array(first), runs[1].array(second))
