"""Lines written in a hurry are those of the record, byte for byte."""

import json
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import needs_library

from tapscope.core.observe import StepInfo
from tapscope.dumper.pipeline.record_batch import RecordBatch
from tapscope.dumper.records import replay_plan, snapshot
from tapscope.dumper.records.dedup_cache import DedupCache
from tapscope.dumper.records.firing import Firing
from tapscope.dumper.records.inflight_record import InflightRecord
from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.records.record_layout import NO_LAYOUT
from tapscope.dumper.records.record_lines import PendingLines
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.selection.site_decision import SiteDecision
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.dumper.steps.row_slicing import SlicedTensor
from tapscope.dumper.transport.packed_rows import SentTables
from tapscope.kernels.native import library
from tapscope.kernels.native.summary import summarize
from tapscope.run_format.record import Key, Record, Slice, encode

ranges = st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9)), min_size=1, max_size=3).map(tuple)
tags = st.dictionaries(
    st.text(min_size=1, max_size=5), st.text(max_size=5) | st.integers(-9, 9) | st.none(), max_size=3
)


@settings(max_examples=100)
@given(
    path=st.text(st.characters(exclude_characters=":", exclude_categories=["Cs"]), max_size=9),
    place=st.tuples(*[st.integers(0, 10**9)] * 3, st.sampled_from(["forward", "recompute", "backward"]), tags),
    model=st.sampled_from(["", "actor", 'q"uote']),
    rows=st.none() | ranges,
    cut=st.none() | st.builds(Slice, st.tuples(*[st.integers(-9, 9)] * 3), st.just((8, 2))),
    cap=st.none() | st.integers(1, 99),
    values=st.lists(st.floats(width=32), min_size=2, max_size=2),
)
def test_record_batch_line_of_a_pending_record_is_that_of_the_record(
    path: str, place: Any, model: str, rows: Any, cut: Slice | None, cap: int | None, values: list[float]
) -> None:
    step, occurrence, micro, pass_, said = place
    tensor = torch.tensor(values)
    port = SitePort(f"{path}:out", SiteDecision(), {}, "a", model=model)
    stamp = Firing(OpenStep(StepInfo(step=step), 0), occurrence, micro, pass_, said or None)
    layout = port.layout(SlicedTensor(tensor, rows, cut), cap, lambda where, reason: None)
    text = snapshot.measure(tensor, layout, DedupCache())[0]
    fast = InflightRecord(port, stamp, 7, layout, text, 0).line()

    found = summarize(tensor.data_ptr(), 2, "float32")
    key = Key(port.site, step, 0, occurrence, micro, pass_, model)
    rec = Record(key, 7, "float32", (2,), "a", rows, found.stats, found.hash, bag=found.bag)
    slow = encode(rec._replace(slice=cut, cap=cap, tags=said or None))
    assert fast == slow


@needs_library
def test_replay_plan_lines_are_those_of_the_records() -> None:
    step = OpenStep(StepInfo(step=41), 0)
    rows, learned, expected = np.zeros((3, 16), np.int64), [], []
    for number, model in enumerate(("", 'q"uote', "actor")):
        tensor = torch.randn(5 + number)
        port = SitePort(f"layers.{number}:out", SiteDecision(), {}, "a", model=model)
        layout = port.layout(SlicedTensor(tensor), None, lambda where, reason: None)
        content = snapshot.measure(tensor, layout, DedupCache())[0]
        library.functions().summarize(
            tensor.data_ptr(), len(tensor), library.CODES["float32"], 1, 0, rows[number].ctypes.data
        )
        record = InflightRecord(port, Firing(step, 0), 100, layout, content, 0)
        learned.append(replay_plan.LearnedRecord(record, 128 * number))
        expected.append(InflightRecord(port, Firing(OpenStep(StepInfo(step=42), 1), 0), 7 + number, layout, content, 0))
    same = InflightRecord(SitePort("lm_head:in[k]", SiteDecision(), {}), Firing(step, 0), 5, NO_LAYOUT, b'"value":3', 0)
    expected.append(InflightRecord(same.port, expected[0].firing, 10, NO_LAYOUT, b'"value":3', 0))
    plan = replay_plan.ReplayPlan([*learned, replay_plan.LearnedRecord(same, -1)])
    assert plan.lines("42", 7, (), rows.ctypes.data)[0].split(b"\n") == [record.line() for record in expected]
    assert plan.sites == ("layers.0:out", "layers.1:out", "layers.2:out", "lm_head:in[k]")


def test_pending_lines_whose_copy_failed_become_one_event_each() -> None:
    class Lost:
        is_ready = True

        def finish(self, record: Any) -> None:
            raise RuntimeError("gone")

    lines = PendingLines(OpenStep(StepInfo(step=3), 0), ("a:out", "b:out"), Lost(), 1).finish()
    events = [json.loads(line) for line in lines.text.splitlines()]
    assert [(e["where"], e["step"], e["late"]) for e in events] == [("a:out", 3, True), ("b:out", 3, True)]
    assert lines.num_lines == 2


def test_record_that_cannot_be_written_takes_no_other_s_bytes_with_it() -> None:
    pool = np.arange(4, dtype=np.uint8), np.arange(4, 8, dtype=np.uint8)
    batch = RecordBatch()
    for number, (said, buffer) in enumerate(zip(({"bad": object()}, None), pool, strict=True)):
        stamp = Firing(OpenStep(StepInfo(step=0), 0), 0, tags=said)
        layout = SitePort(":out", SiteDecision(), {}).layout(
            SlicedTensor(torch.zeros(4, dtype=torch.uint8)), None, lambda *_: None
        )
        slot = PayloadSlot(buffer.ctypes.data, 4, -1, buffer)
        batch.add(
            InflightRecord(
                SitePort(f":out[{number}]", SiteDecision(), {}), stamp, 0, layout, b'"hash":""', 0, number, slot
            )
        )
    message = batch.message(0, SentTables())
    assert [json.loads(line)["type"] for line in message.frames[0].split(b"\n")] == ["event", "record"]
    (described,) = message["payloads"]
    assert described[:2] == [1, 1]
    assert [bytes(frame) for frame in message.frames[1:]] == [b"\x04\x05\x06\x07"]
    assert len(batch.slots) == 2  # both are free again once it is acknowledged
