"""Taps in captured CUDA graphs and their replays: the part testable on a CPU; tests/gpu has the rest."""

import ctypes
import json
import zlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from tapscope.core.observe import RowSpan, StepInfo
from tapscope.dumper import Dumper
from tapscope.dumper.capture import capturer
from tapscope.dumper.device import cuda_graphs, graph_memory
from tapscope.dumper.device.device_row_keys import PADDING, DeviceRowKeys
from tapscope.dumper.device.graph_fetch import ONLY_STATISTICS, Fetch, fetch_here, fetching
from tapscope.dumper.device.graph_memory import ROW_BYTES, GraphMemory
from tapscope.dumper.recording import graph_taps
from tapscope.dumper.recording.graph_taps import GraphTaps
from tapscope.dumper.records.record_layout import RecordLayout
from tapscope.dumper.records.record_lines import PendingLines, leave_out_sketches
from tapscope.dumper.records.replay_plan import LearnedRecord, ReplayPlan
from tapscope.dumper.records.sketcher import SKETCH_LAYOUT, DevicePlace, SketchCopy, counters_at
from tapscope.dumper.steps.deferred_line import LateInfo
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.dumper.taps.taps import ReplayMark, find_taps
from tapscope.kernels import triton
from tapscope.kernels.native import sketch as native_sketch
from tapscope.run_format.sketch import SketchIndex, row_keys, sketch_index
from tapscope.sources import open_run


def captured(model: nn.Module, *args: torch.Tensor) -> cuda_graphs.GraphCapture:
    """Return the capture of one call of the model."""
    capture = cuda_graphs.GraphCapture()
    cuda_graphs._enter(capture)
    try:
        model(*args)
    finally:
        cuda_graphs._leave()
    return capture


def test_graph_taps_fire_a_step_for_each_replay_and_none_for_the_capture(tmp_path: Path) -> None:
    model, ids = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)), torch.arange(6)[None]
    with torch.no_grad(), Dumper(model, tmp_path / "eager", keep="full"):
        for _ in range(3):
            model(ids)
    launches: list[int] = []
    with torch.no_grad(), Dumper(model, tmp_path / "graph", keep="full") as dumper:
        with dumper.rehearsal():
            model(ids)
        model(ids)
        capture = captured(model, ids)
        for step in (1, 2):
            assert capture.replayed(lambda step=step: launches.append(step)) is None
    capture.replayed(lambda: launches.append(3))  # after the Dumper was closed
    assert launches == [1, 2, 3]
    eager, run = open_run(tmp_path / "eager"), open_run(tmp_path / "graph")
    assert [(r.key, r.hash) for r in run.records] == [(r.key, r.hash) for r in eager.records]
    assert [run.steps[n][0].info for n in range(3)] == [eager.steps[n][0].info for n in range(3)]
    assert run.ledger().complete


def test_graph_memory_rules_of_other_steps_leave_a_replay_out(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="off", rules=["0:out=full every=2"]):
        capture = captured(model, torch.ones(2, 4))
        for _ in range(4):
            capture.replayed(lambda: None)
    assert [(r.key.step, r.key.site) for r in open_run(tmp_path / "run").records] == [(0, "0:out"), (2, "0:out")]


def test_graph_memory_capture_with_other_rules_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="off", rules=["0:out=stats"]) as dumper:
        before = dumper.tap_state
        capture = captured(model, torch.ones(2, 4))
        dumper.configure(rules=["1:out=full"])
        assert dumper.tap_state != before
        capture.replayed(lambda: None)
        capture.replayed(lambda: None)
        dumper.configure(rules=["0:out=stats"])
        assert dumper.tap_state == before
    assert caplog.text.count("captured with other taps than those in place") == 1


def test_graph_memory_snapshots_what_a_replay_wrote() -> None:
    memory = GraphMemory(torch.device("cpu"))
    source = torch.arange(12.0).reshape(3, 4).t()
    kept, other = memory.keep(source), memory.keep(torch.ones(1 << 20, dtype=torch.bfloat16))
    fetch = Fetch(memory)
    with fetching(fetch):
        assert fetch_here() is fetch
        handle = fetch.handle_of(kept)
    assert fetch_here() is None
    assert handle is not None
    kept.zero_()  # overwritten by the next replay
    handle.wait()
    found = torch.frombuffer((ctypes.c_ubyte * 48).from_address(handle.address), dtype=torch.float32)
    assert torch.equal(found.reshape(4, 3), source)
    assert fetch.handle_of(source) is None
    assert fetch.handle_of(kept[:, 1:]) is None
    assert (tail := fetch.handle_of(other[8:])) is not None
    assert tail.address % 16 == 0
    assert memory.keep(empty := torch.empty(0, 4)) is empty


def test_fetch_that_has_arrived_gives_its_memory_back_without_asking_the_device_again() -> None:
    asked: list[bool] = []
    event = SimpleNamespace(query=lambda: not asked.append(True))
    memory = GraphMemory(torch.device("cpu"))
    fetch, buffer = Fetch(memory), cast(Any, SimpleNamespace(event=event))
    fetch._buffer = buffer
    for _ in range(2):
        fetch.wait()
    del fetch
    assert list(memory.buffers) == [buffer]
    assert asked == [True]
    dropped = Fetch(memory)  # no handle has waited for the copy
    dropped._buffer = buffer
    del dropped
    assert asked == [True, True]


def test_graph_memory_replays_of_graphs_captured_before_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 4)
    with Dumper(model, tmp_path / "run", keep="full"):
        monkeypatch.setattr(cuda_graphs, "num_unknown_replays", cuda_graphs.num_unknown_replays + 2)
    assert "2 replays of CUDA graphs that were captured before the Dumper was opened" in caplog.text
    assert [e.fields["where"] for e in open_run(tmp_path / "run").events() if e.kind == "failed"] == ["step"]


class _Tap(SimpleNamespace):
    """A tap with one port."""

    def __init__(self, key: str) -> None:
        super().__init__(key=key, has_grads=False, add_mark=lambda kind, mark: None)
        self.configure()

    def configure(self) -> None:
        """Reset the ports as a new configuration does."""
        self.ports = {("out", ""): SimpleNamespace(keep="stats", decision=SimpleNamespace(triggers=None), grad=None)}

    def has_fired_in(self, serial: int) -> bool:
        return False


class _Model:
    """A fake model and collector that record one value per replay."""

    state = "taps"

    def __init__(self) -> None:
        self.collector, self.num_sent, self.num_planned, self.grid = self, 0, 0, (1,)

    def shared_firing(self) -> SimpleNamespace:
        return self.firing

    @property
    def outcome(self) -> tuple[int, int]:
        return self.num_sent, 0

    def put_replay(self, plan: object, firing: object, fetch: object) -> None:
        self.num_planned += 1

    def fire(self, tap: _Tap, kind: str, leaves: object) -> None:
        if leaves:
            self.num_sent += 1
            fetch = fetch_here()
            assert fetch is not None
            fetch.learn(SimpleNamespace(firing=self.firing, slot=None, pending_copy=None, layout=None, stored=None))

    def replay(self, taps: GraphTaps, serial: int, rows: int) -> bool:
        """Replay the graph; returns whether a plan recorded the replay."""
        info, before = SimpleNamespace(grid=(rows,), num_padding=0), self.num_planned
        self.firing = SimpleNamespace(step=SimpleNamespace(info=info, row_ranges={}, serial=serial))
        taps.after_replay()
        return self.num_planned > before


def _planned(model: Any, monkeypatch: pytest.MonkeyPatch, tap: _Tap) -> GraphTaps:
    monkeypatch.setattr(graph_taps, "ReplayPlan", list)
    monkeypatch.setattr(graph_taps, "is_available", lambda: True)
    taps = GraphTaps(model, model)
    taps._memories[torch.device("cpu")] = GraphMemory(torch.device("cpu"))
    for kind, leaves in (("in", []), ("out", [("", 1.0)])):
        taps._add("fire", lambda model, kind=kind, leaves=leaves: model.fire(tap, kind, leaves))
        taps._fires.append((cast(Any, tap), kind, cast(Any, leaves)))
    return taps


def test_graph_taps_forget_every_plan_when_the_configuration_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tap = _Model(), _Tap("a")
    taps = _planned(model, monkeypatch, tap)
    assert [model.replay(taps, serial, rows) for serial, rows in enumerate((1, 2, 1, 2))] == [False, False, True, True]
    tap.configure()
    assert [model.replay(taps, serial, rows) for serial, rows in enumerate((1, 2, 1, 2), 4)] == [
        False,
        False,
        True,
        True,
    ]


def test_graph_taps_of_another_recording_do_not_share_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    tap, models = _Tap("a"), (_Model(), _Model())
    first, second = (_planned(model, monkeypatch, tap) for model in models)
    assert [models[0].replay(first, serial, 1) for serial in (0, 1)] == [False, True]
    assert [models[1].replay(second, serial, 1) for serial in (0, 1)] == [False, True]


def test_tap_has_fired_in_the_step_of_a_replay_while_its_graph_lives() -> None:
    tap, marks = find_taps(nn.Linear(4, 4))[0], [ReplayMark(), ReplayMark()]
    for mark in (*marks, marks[0]):
        tap.add_mark("out", mark)
    marks[1].serial = 7
    assert [tap.has_fired_in(serial) for serial in (6, 7)] == [False, True]
    assert tap.occurrence(7, "out", 0) == 1  # the replay was occurrence 0
    tap.serial = -1
    del marks[1]
    del mark
    assert not tap.has_fired_in(7)
    tap.add_mark("out", marks[0])
    assert [known() for known in tap.marks["out"]] == marks


def test_capturer_keeps_statistics_where_a_graph_has_no_values_for_a_sketch(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, bool]] = []
    reports: list[str] = []
    self = SimpleNamespace(
        comparison=None,
        device=SimpleNamespace(record=lambda *args, **keeps: found.append(keeps)),
        _counters=SimpleNamespace(report=lambda site, reason, step: reports.append(reason)),
    )
    monkeypatch.setattr(
        capturer, "fetch_here", lambda: SimpleNamespace(is_row=lambda _: True, is_sketched=lambda _: False)
    )
    port, tensor = SimpleNamespace(announced=True, site="a:out"), SimpleNamespace(is_cuda=True)
    args: Any = self, port, SimpleNamespace(step=None), tensor, SimpleNamespace(count=4)
    capturer.Capturer._record(*args, full=False, sketch=True)
    assert found == [{"full": False, "sketch": False}]
    assert reports == [f"kept as statistics: {ONLY_STATISTICS}"]


def test_graph_memory_sketches_the_rows_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter: of 8 rows, the first 3 belong to requests; the counters equal those of the host."""
    if triton.why_not(torch.device("cpu")) is not None:
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1 and a CPU")
    monkeypatch.setattr(graph_memory, "kernel_for", lambda device, dtype: True)
    rows = (RowSpan("a", 7, 1, 0, 0), RowSpan("b", 0, 1, 0, 1), RowSpan("c", 3, 1, 0, 2))
    info = StepInfo(step=4, grid=(3,), rows=rows, num_padding=5)
    memory, values = GraphMemory(torch.device("cpu")), torch.randn(8, 76)[:, :72]
    keys = row_keys(info)
    assert keys is not None
    place = DevicePlace(True, 0, (8, 72, 0, 72, 72))  # the second shard of 144 columns
    memory._keys = torch.zeros(8, dtype=torch.int64)
    memory._num_keys = 8
    given = DeviceRowKeys().of(OpenStep(info, 4), torch.device("cpu"))
    memory.set_keys(info, given)  # here kernels run immediately instead of in a replay
    assert memory._keys.tolist() == keys.keys.tolist() + [PADDING] * 5
    read: list[torch.Tensor] = []
    inner = graph_memory._readable
    monkeypatch.setattr(graph_memory, "_readable", lambda tensor: read.append(inner(tensor)) or read[0])
    row = memory.summarize(values, 8, place)
    assert row is not None
    assert read.pop().data_ptr() == values.data_ptr()  # strided rows are read in place, without a copy
    fetch = Fetch(memory)
    assert fetch.is_sketched(row[:3])
    assert fetch.sketch_handle_of(row[:3], StepInfo(step=5), place) is None
    assert fetch.sketch_handle_of(row[:3], info, DevicePlace(True, 0, (3, 72, 0, 0, 72))) is None
    scattered = DevicePlace(True, 0, (3, 72, 0, 72, 72), torch.tensor([0, 2, 3]))
    assert fetch.sketch_handle_of(row[:3], info, scattered) is None
    found = fetch.sketch_handle_of(row[:3], info, DevicePlace(True, 0, (3, 72, 0, 72, 72)))
    assert found is not None
    index = sketch_index((3, 72), keys, dims="t h[tp]", mesh={"tp": 2}, coords={"tp": 1})
    assert isinstance(index, SketchIndex)
    dense = values.contiguous()
    expected = native_sketch.sketch(dense.data_ptr(), "float32", index)
    np.testing.assert_allclose(counters_at(found[1]), expected, rtol=1e-5, atol=1e-5)

    copy = SketchCopy(lambda slot: None)
    copy.place = ROW_BYTES
    layout = RecordLayout(',"dtype":"float32","shape":[3,72]', "float32", [3, 72], 216, 864)
    port: Any = SimpleNamespace(site="a:out", site_text='"a:out"', model="", model_text="")
    record: Any = SimpleNamespace(port=port, layout=layout, stored=SKETCH_LAYOUT, content=b"", pending_copy=copy)
    begin = fetch.begin()
    plan = ReplayPlan([LearnedRecord(record, found[0].address - begin, has_bytes=True)])
    room = torch.zeros(256)
    slot: Any = SimpleNamespace(address=room.data_ptr())
    lines, digest = plan.lines("4", 11, [slot], begin)
    np.testing.assert_allclose(room.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert len(digest) == 16
    line = json.loads(lines)
    assert line["sketch"] == {"by_rows": True, "crc32": zlib.crc32(room.numpy().tobytes())}
    assert (line["seq"], line["step"], line["stats"]["count"]) == (11, 4, 8 * 72)  # without set_rows()

    memory.set_keys(None, None)
    assert memory._keys.tolist() == [PADDING] * 8
    assert fetch.sketch_handle_of(row[:3], info, place) is None


def test_sketches_of_a_row_that_is_left_out_later_are_left_out() -> None:
    """A request of a step launched ahead turns out to have ended: a sketch that includes its row is left out."""
    rows = (RowSpan("a", 7, 1, 0, 0), RowSpan("b", 0, 1, 0, 1))
    late = LateInfo(StepInfo(step=4, grid=(2,), rows=rows))
    step = OpenStep(late.outline, 4, late_rows=late)
    freed: list[int] = []
    slots = [SimpleNamespace(slot=SimpleNamespace(nbytes=nbytes)) for nbytes in (1024, 8)]
    payloads: Any = [(0, 5, slots[0]), (1, 6, slots[1])]
    text = b'{"a":1,"sketch":{"by_rows":true,"crc32":3}}\n{"b":1,"sketch":{"by_rows":false,"crc32":4}}'
    copy: Any = SimpleNamespace(finish=lambda lines: setattr(lines, "content", text))
    amend = partial(leave_out_sketches, {0}, lambda slot: freed.append(slot.nbytes))
    assert len(PendingLines(step, ["a", "b"], copy, 0, payloads, amend).finish().payloads) == 2
    late.complete(StepInfo(step=4, grid=(2,), rows=rows[:1]))
    lines = PendingLines(step, ["a", "b"], copy, 0, payloads, amend).finish()
    assert (lines.text, freed) == (b'{"a":1}\n{"b":1,"sketch":{"by_rows":false,"crc32":4}}', [1024])
    assert [number for _, number, _ in lines.payloads] == [6]
