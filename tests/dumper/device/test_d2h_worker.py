"""Values that arrive after their hook: a fake device whose copies the test releases, a real queue and recorder."""

import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from jobs import wait_until
from msgspec.structs import replace
from torch import nn

from tapscope.core.observe import RowSpan, StepInfo
from tapscope.dumper import Dumper
from tapscope.dumper.capture.capturer import Capturer
from tapscope.dumper.device.d2h_worker import D2HWorker
from tapscope.dumper.device.device import CudaDevice
from tapscope.dumper.device.device_row_keys import keys_at
from tapscope.dumper.device.late_rows import LateRows
from tapscope.dumper.device.staging_budget import MAX_DIRECT_BYTES
from tapscope.dumper.job.framework_plugins import registry
from tapscope.dumper.pipeline.send_queue import SendQueue
from tapscope.dumper.records.firing import Firing
from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.steps.row_slicing import SlicedTensor, slots_as_ranges
from tapscope.dumper.taps.collector import Collector
from tapscope.dumper.transport.shm_ring import ShmRing
from tapscope.frameworks import vllm
from tapscope.frameworks.megatron import MegatronPlugin
from tapscope.kernels.native import sketch, summary
from tapscope.run_format.run import Run
from tapscope.run_format.sketch import SketchIndex, row_keys, sketch_index
from tapscope.sources import open_run

N = MAX_DIRECT_BYTES // 2
"""Number of floats of a tensor too large to be copied in the model's own stream."""


class SlowTicket:
    """A copy that reads its source only when the gate opens; the values must still be those of the hook."""

    def __init__(self, device: "SlowDevice", source: torch.Tensor, held_bytes: int, ran_out: bool) -> None:
        self._device = device
        self._source = source
        self._staging = torch.zeros(source.nbytes, dtype=torch.uint8)
        self.held_bytes = held_bytes
        self.ran_out = ran_out
        self.address = self._staging.data_ptr()

    def wait(self) -> None:
        self._device.gate.wait()
        if self._device.problem is not None:
            raise RuntimeError(self._device.problem)
        self._staging.copy_(self._source.reshape(-1).view(torch.uint8))


class SlowDevice:
    """A fake device in host memory, whose copies stall until ``gate`` is set."""

    def __init__(self, *, memory: int = 1 << 30) -> None:
        self.gate = threading.Event()
        self.problem: str | None = None
        self.memory = memory
        self.rings: list[ShmRing | None] = []

    def enter(self) -> None:
        pass

    def start(self, tensor: torch.Tensor, slot: PayloadSlot, *, clone: bool) -> SlowTicket:
        ran_out = clone and tensor.nbytes > self.memory
        held = tensor.nbytes if clone and not ran_out else 0
        return SlowTicket(self, tensor.clone(memory_format=torch.contiguous_format), held, ran_out)

    def summarize(self, tensor: torch.Tensor) -> None:
        return None

    def sketch(self, tensor: torch.Tensor, request: Any) -> None:
        return None

    def close_rows(self) -> None:
        pass

    def pin(self, ring: ShmRing) -> None:
        self.rings.append(ring)

    def unpin(self) -> None:
        self.rings.append(None)


class SlowRow:
    """A row computed at the hook that arrives once the gate is open and the block is closed."""

    held_bytes, ran_out = 0, False

    def __init__(self, device: "RowDevice", tensor: torch.Tensor) -> None:
        self._device, self.number = device, device.num_rows
        self._room = np.zeros(summary.ROW_BYTES, np.uint8)
        found = summary.summarize_array(tensor.detach().numpy())
        counts, h1, h2 = found.stats, int(found.hash[:16], 16), int(found.hash[16:], 16)
        self._room[:] = np.frombuffer(
            struct.pack(
                "=7q5d3Q",
                *(counts.count, counts.nan, counts.posinf, counts.neginf, counts.zeros, counts.subnormals),
                counts.count - counts.nan - counts.posinf - counts.neginf,
                *(counts.min or 0.0, counts.max or 0.0, counts.absmax or 0.0, counts.sum, counts.sumsq),
                *(h1, h2, int(found.bag or "0", 16)),
            ),
            np.uint8,
        )
        self.address = self._room.ctypes.data

    @property
    def is_last(self) -> bool:
        return self.number % 3 == 2

    def wait(self) -> None:
        self._device.gate.wait()
        assert self.number < self._device.num_closed, "nobody may wait for a block that is open"


class RowDevice(SlowDevice):
    """A fake device that computes statistics, in blocks of three rows."""

    num_rows = num_closed = 0

    def summarize(self, tensor: torch.Tensor) -> SlowRow:
        row = SlowRow(self, tensor)
        self.num_rows += 1
        return row

    def close_rows(self) -> None:
        self.num_closed = self.num_rows


class SketchRow(SlowRow):
    """A row with sketch counters, which arrive together with the row."""

    def __init__(self, device: "RowDevice", tensor: torch.Tensor, request: Any) -> None:
        dense = tensor.detach().contiguous()
        super().__init__(device, dense)
        from tapscope.kernels.triton.sketch import Part, Sketches

        self._counters = torch.empty(256)
        self.counters_address = self._counters.data_ptr()
        sketches = Sketches(tensor.device, 1, 8)
        sketches.add(dense, request.keys, Part(*request.part), 0, self.counters_address)
        sketches.merge(1)

    def wait(self) -> None:
        super().wait()
        if self._device.problem is not None:
            raise RuntimeError(self._device.problem)


class SketchDevice(RowDevice):
    """A fake device that also computes sketches of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[Any] = []

    def start(self, tensor: torch.Tensor, slot: PayloadSlot, *, clone: bool) -> SlowTicket:
        self.copied.append(tensor.dtype)
        return super().start(tensor, slot, clone=clone)

    def sketch(self, tensor: torch.Tensor, request: Any) -> SketchRow | None:  # type: ignore[override]
        if not tensor.is_floating_point():
            return None
        row = SketchRow(self, tensor, request)
        self.num_rows += 1
        return row


class DeviceOnly(Capturer):
    """A capturer that treats every non-empty tensor as a device tensor."""

    def begin(self, first: Firing) -> None:
        super().begin(first)
        self.native.end()  # the native writer would read host memory

    def _record(
        self, port: SitePort, firing: Firing, tensor: torch.Tensor, layout: Any, *, full: bool, sketch: bool = False
    ) -> None:
        if layout.count:
            if not port.announced:
                self._records.announce(port)
            self.device.record(port, firing, tensor, layout, full=full, sketch=sketch)
        else:
            super()._record(port, firing, tensor, layout, full=full, sketch=sketch)

    def _watch(self, port: SitePort, leaf: torch.Tensor, firing: Firing) -> None:
        layout = port.layout(SlicedTensor(leaf), None, self._counters.report)
        self.device.watch(port, firing, leaf, layout)


@contextmanager
def dumper_of(
    model: nn.Module, run: Path, device: SlowDevice, *, time_limit_s: float = 60.0, **settings: Any
) -> Iterator[tuple[Dumper, Collector, D2HWorker]]:
    """Context manager: a dumper of values on ``device``, whose gate opens at the end of the block."""
    with Dumper(model, run, **settings) as dumper:
        recording = dumper._recording
        assert recording is not None
        collector = recording.collector
        capturer, limit = collector.capturer, recording.active.config.device_staging_bytes
        capturer.__class__ = DeviceOnly
        drain = D2HWorker(device, collector._queue, limit, collector.counters.count_lost_copy, time_limit_s)
        capturer.device.running = drain
        try:
            yield dumper, collector, drain
        finally:
            device.gate.set()


class Writes(nn.Module):
    """Modifies its output in place after the hook has fired, as fused residual adds do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * 1).mul_(0)


def _call(dumper: Dumper, x: torch.Tensor) -> None:
    model = dumper._models.modules[0]
    assert model is not None
    model(x)


def values(run: Run) -> dict[str, Any]:
    return {f"{r.key.step} {r.key.site}": set(run.array(r).tolist()) for r in run.records if r.entry}


def test_d2h_worker_what_the_model_had_at_the_hook_is_recorded_and_in_order(tmp_path: Path) -> None:
    device = SlowDevice()
    with torch.no_grad(), dumper_of(Writes(), tmp_path / "run", device, keep="full") as (dumper, collector, drain):
        for step in range(3):
            with dumper.step():
                _call(dumper, torch.full((N,), step + 1.0))
        assert drain.staging.held_bytes == 3 * 4 * 4 * N  # four sites; the model did not wait
        assert collector._queue.is_awaiting_device
    run = open_run(tmp_path / "run")
    assert run.ledger().complete, run.ledger().sentences()
    assert [r.seq for r in run.records] == list(range(12))
    assert values(run) == {
        f"{step} {site}": {value}
        for step in range(3)
        for site, value in ((":in[x]", step + 1), ("inner:in[input]", step + 1), ("inner:out", step + 1), (":out", 0))
    }
    assert all(r.stats and r.hash for r in run.records)


def test_d2h_worker_equal_bytes_of_a_step_are_stored_once(tmp_path: Path) -> None:
    device = SlowDevice()
    with torch.no_grad(), dumper_of(nn.Identity(), tmp_path / "run", device, keep="full") as (dumper, _, _):
        for _ in range(2):
            with dumper.step():
                _call(dumper, torch.arange(4096.0))
    run = open_run(tmp_path / "run")
    entries = {step: {r.entry for r in run.records if r.key.step == step} for step in (0, 1)}
    assert [len(entries[step]) for step in (0, 1)] == [1, 1]
    assert entries[0] != entries[1]
    assert len(values(run)) == 4


def test_d2h_worker_statistics_leave_no_bytes_and_give_their_memory_back(tmp_path: Path) -> None:
    device = SlowDevice()
    with torch.no_grad(), dumper_of(nn.Identity(), tmp_path / "run", device, keep="stats") as (dumper, collector, _):
        with dumper.step():
            _call(dumper, torch.arange(4096.0))
        assert collector._queue.in_flight_bytes > 2 * 4096 * 4
        device.gate.set()
        wait_until(lambda: collector._queue.in_flight_bytes == 0, "the slots are free")
    run = open_run(tmp_path / "run")
    assert [(r.stats.max, r.entry) for r in run.records if r.stats] == [(4095.0, None)] * 2
    assert run.ledger().complete


@pytest.mark.parametrize("native", [True, False])
def test_d2h_worker_statistics_computed_on_the_device_move_no_values(
    tmp_path: Path, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(summary.library, "functions", lambda: None)
    device, x = RowDevice(), torch.tensor([1.5, -2.0, torch.inf, 0.0, torch.nan]).repeat(N)
    with torch.no_grad(), dumper_of(Writes(), tmp_path / "run", device, keep="stats") as (dumper, collector, _):
        for step in range(3):
            with dumper.step():
                _call(dumper, x + step)
            assert device.num_closed == 4 * (step + 1)  # the end of the step closes the blocks
            assert collector._queue.in_flight_bytes < x.nbytes
    model = Writes()
    with torch.no_grad(), Dumper(model, tmp_path / "plain", keep="stats") as dumper:
        for step in range(3):
            with dumper.step():
                model(x + step)
    found, plain = open_run(tmp_path / "run"), open_run(tmp_path / "plain")
    assert found.ledger().complete, found.ledger().sentences()
    assert [(r.key, r.seq, r.stats, r.hash, r.bag) for r in found.records] == [
        (r.key, r.seq, r.stats, r.hash, r.bag) for r in plain.records
    ]


def test_d2h_worker_rows_come_before_a_value_that_is_kept_whole_and_at_the_end(tmp_path: Path) -> None:
    device = RowDevice()
    rules = ["inner:*=full"]
    with torch.no_grad(), dumper_of(Writes(), tmp_path / "run", device, keep="stats", rules=rules) as (dumper, _, _):
        with dumper.step():
            _call(dumper, torch.ones(8))
            assert device.num_closed == 1  # the row of the model's input, before the first value kept in full
        device.gate.set()
        _call(dumper, torch.ones(8))
    run = open_run(tmp_path / "run")
    assert run.ledger().complete
    assert [r.seq for r in run.records] == list(range(len(run.records)))
    assert {r.key.site for r in run.records if r.entry} == {"inner:in[input]", "inner:out"}


def test_d2h_worker_rows_that_a_device_does_not_hand_over_are_counted(tmp_path: Path) -> None:
    device = RowDevice()
    outer = dumper_of(nn.Identity(), tmp_path / "run", device, keep="stats", time_limit_s=0.3)
    with torch.no_grad(), outer as (dumper, collector, _):
        with dumper.step():
            _call(dumper, torch.ones(8))
        wait_until(lambda: collector.counters.num_failed == 2, "both are given up")
    run = open_run(tmp_path / "run")
    assert run.ledger().failed == 2
    assert not list(run.records)


def test_d2h_worker_clones_are_bounded_and_copies_beyond_are_counted_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = SlowDevice()
    x = torch.arange(float(N))
    with (
        torch.no_grad(),
        dumper_of(nn.Identity(), tmp_path / "run", device, keep="full", device_staging_bytes=3 * x.nbytes) as (
            dumper,
            _,
            drain,
        ),
    ):
        for _ in range(4):
            with dumper.step():
                _call(dumper, x)
                assert drain.staging.held_bytes <= 3 * x.nbytes
    run = open_run(tmp_path / "run")
    assert run.ledger().complete
    assert len(values(run)) == 8
    counts = [m.value for m in run.metrics() if m.name == "num_direct_copies"]
    assert counts == [0, 1, 2, 2]
    assert f"device_staging_bytes={3 * x.nbytes} are in use" in caplog.text


def test_d2h_worker_small_values_need_no_clone_unless_larger_copies_are_before_them(tmp_path: Path) -> None:
    device = SlowDevice()
    with torch.no_grad(), dumper_of(nn.Identity(), tmp_path / "run", device, keep="full") as (dumper, _, drain):
        with dumper.step():
            _call(dumper, torch.ones(16))
        assert drain.staging.held_bytes == 0
        with dumper.step():
            _call(dumper, torch.ones(N))
            _call(dumper, torch.ones(16))
        assert drain.staging.held_bytes == 2 * 4 * N + 2 * 4 * 16
    run = open_run(tmp_path / "run")
    assert run.ledger().complete
    assert [m.value for m in run.metrics() if m.name == "num_direct_copies"] == [0, 0]


def test_d2h_worker_device_without_memory_for_clones_is_not_asked_again(tmp_path: Path) -> None:
    device = SlowDevice(memory=0)
    with torch.no_grad(), dumper_of(nn.Identity(), tmp_path / "run", device, keep="full") as (dumper, _, drain):
        for _ in range(2):
            with dumper.step():
                _call(dumper, torch.ones(N))
        assert drain.staging.held_bytes == 0
        assert drain.staging.limit == 0
    run = open_run(tmp_path / "run")
    assert run.ledger().complete
    assert [m.value for m in run.metrics() if m.name == "num_direct_copies"] == [2, 2]


def test_d2h_worker_device_that_fails_is_counted_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = SlowDevice()
    with torch.no_grad(), dumper_of(nn.Identity(), tmp_path / "run", device, keep="full") as (dumper, collector, _):
        with dumper.step():
            _call(dumper, torch.ones(N))
        device.problem = "CUDA error: an illegal memory access was encountered"
        device.gate.set()
        wait_until(lambda: collector.counters.num_failed == 2, "both have failed")
        device.problem = None
        with dumper.step():
            _call(dumper, torch.ones(N))
    run = open_run(tmp_path / "run")
    account = run.ledger()
    assert (account.failed, account.lost, account.complete) == (2, 0, False)
    assert {r.key.step for r in run.records} == {1}
    (reason,) = {e.fields["reason"] for e in run.events() if e.kind == "failed"}
    assert "an illegal memory access" in reason
    assert "2 values could not be captured" in caplog.text


def test_d2h_worker_device_that_stands_still_is_given_up_and_nothing_hangs(tmp_path: Path) -> None:
    device = SlowDevice()
    with torch.no_grad():
        outer = dumper_of(nn.Identity(), tmp_path / "run", device, time_limit_s=0.3, keep="full")
        with outer as (dumper, collector, drain):
            with dumper.step():
                _call(dumper, torch.ones(N))
            wait_until(lambda: collector.counters.num_failed == 2, "both are given up")
            slots = collector._queue.in_flight_bytes
            assert slots >= 2 * 4 * N  # memory that the device may still write to is not reused
            device.gate.set()
            wait_until(
                lambda: collector._queue.in_flight_bytes == 0 and not drain.staging.held_bytes, "it came after all"
            )
            with dumper.step():
                _call(dumper, torch.ones(N))
    run = open_run(tmp_path / "run")
    assert run.ledger().failed == 2
    assert {r.key.step for r in run.records} == {1}


def test_d2h_worker_strict_waits_for_the_device_at_the_end_of_a_step(tmp_path: Path) -> None:
    device = SlowDevice()
    settings = {"keep": "full", "backpressure": "strict", "block_timeout_s": 0.1}
    with torch.no_grad(), dumper_of(nn.Identity(), tmp_path / "run", device, **settings) as (dumper, collector, _):
        timer = threading.Timer(1.5, device.gate.set)
        timer.start()
        with dumper.step():
            _call(dumper, torch.ones(N))
        assert collector._queue.is_empty
        timer.join()
    assert open_run(tmp_path / "run").ledger().complete


def test_d2h_worker_pipeline_answers_while_it_waits_for_a_device(tmp_path: Path) -> None:
    device = SlowDevice()
    with torch.no_grad(), dumper_of(nn.Identity(), tmp_path / "run", device, keep="full") as (dumper, collector, _):
        with dumper.step():
            _call(dumper, torch.ones(N))
        pipeline = dumper._recording.client._sender
        heard = pipeline._last_received
        wait_until(lambda: pipeline._last_received > heard, "the recorder has asked and was answered")
        assert collector._queue.is_awaiting_device


def test_d2h_worker_frees_a_forgotten_step_once_its_copies_have_arrived(tmp_path: Path) -> None:
    device = SlowDevice()
    settings: dict[str, Any] = {"keep": "full", "flight_recorder_steps": 1}
    with torch.no_grad(), dumper_of(nn.Identity(), tmp_path / "run", device, **settings) as (dumper, collector, _):
        for step in range(3):
            with dumper.step():
                _call(dumper, torch.full((N,), step + 1.0))
        flight = collector.retention._flight
        assert flight.used > 3 * 2 * 4 * N  # the device still writes to slots of discarded steps
        device.gate.set()
        wait_until(lambda: flight.used < 2 * 2 * 4 * N, "they have come and are free")
        collector.retention.release(None, "the test asks")
    run = open_run(tmp_path / "run")
    assert {r.key.step for r in run.records} == {2}
    assert all(set(run.array(r).tolist()) == {3.0} for r in run.records)


@pytest.mark.parametrize("keep", ["off", "stats", "full"])
def test_d2h_worker_trigger_sees_a_value_when_it_comes_and_keeps_it(tmp_path: Path, keep: str) -> None:
    device = SlowDevice()
    settings: dict[str, Any] = {"keep": keep, "triggers": (":out: nan -> keep",)}
    with torch.no_grad(), dumper_of(nn.Identity(), tmp_path / "run", device, **settings) as (dumper, _, drain):
        for x in (1.0, float("nan")):
            with dumper.step():
                _call(dumper, torch.full((8,), x))
        device.gate.set()
        wait_until(lambda: not drain.staging.num_pending, "all have come")
    run = open_run(tmp_path / "run")
    assert [(e.fields["step"], e.fields["site"]) for e in run.events() if e.kind == "trigger"] == [(1, ":out")]
    full = {(r.key.step, r.key.site) for r in run.records if r.entry}
    everything = {(step, site) for step in (0, 1) for site in (":in[args.0]", ":in[input]", ":out")}
    assert full == ({(1, ":out")} if keep != "full" else full & everything)
    assert (1, ":out") in full
    assert run.ledger().complete, run.ledger().sentences()


def test_d2h_worker_ring_that_comes_later_is_followed_and_let_go() -> None:
    device = SlowDevice()
    device.gate.set()
    backlog = SendQueue(1 << 24, 1.0, None)
    drain = D2HWorker(device, backlog, 1 << 20, lambda: None)
    layout = SitePort(":out", _static(), {}).layout(SlicedTensor(torch.ones(4)), None, lambda *_: None)
    for ring in (None, ShmRing(1 << 20)):
        backlog.ring = ring
        slot = backlog.reserve(16)
        assert slot is not None
        copy = drain.start(torch.ones(4), layout, slot, backlog.cancel)
        wait_until(lambda copy=copy: copy.is_done, "it has come")
    drain.close()
    assert device.rings == [backlog.ring, None]
    backlog.ring.unlink()
    assert backlog.in_flight_bytes == 0
    with pytest.raises(Exception, match="the capture has ended"):
        drain.start(torch.ones(4), layout, PayloadSlot(0, 16, -1, None), None)


def test_d2h_worker_wakes_for_triggers_and_not_for_the_rows_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's thread would compete for the GIL with the forward that has just begun."""
    monkeypatch.setattr(D2HWorker, "_start_thread", lambda self: None)
    worker = D2HWorker(SlowDevice(), SendQueue(1 << 24, 1.0, None), 1 << 20, lambda: None)
    outline = StepInfo(step=0, grid=(1, 3))
    late = LateRows(worker, {"ids": torch.tensor([[3, 4, 5]])}, outline, lambda info, values: info, print)
    assert not late.is_ready
    assert not worker._end_yield.is_set()
    layout = SitePort(":out", _static(), {}).layout(SlicedTensor(torch.ones(4)), None, lambda *_: None)
    worker.start(torch.ones(4), layout, PayloadSlot(0, 16, -1, None), None, lambda stats: False)
    assert worker._end_yield.is_set()


def _static() -> Any:
    from tapscope.dumper.config import DumperConfig
    from tapscope.dumper.selection.selection import Selection

    return Selection(DumperConfig(keep="full")).decision(":out")


def test_d2h_worker_without_a_gpu_the_module_is_there_and_does_nothing() -> None:
    unpin: Callable[[], None] = CudaDevice().unpin
    unpin()
    assert not torch.cuda.is_initialized()


class Rows(nn.Module):
    """A model with the arguments of transformers' models."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.inner(input_ids.float())


IDS = torch.tensor([[9, 9, 3, 4], [5, 6, 7, 8]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])


def _steps(run: Run) -> list[Any]:
    infos = [run.steps[number][0].info for number in sorted(run.steps)]
    return [(info.grid, info.rows, tuple(info.token_ids), info.phase) for info in infos]


def test_d2h_worker_rows_on_a_device_are_read_later_and_are_those_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad(), Dumper(here := Rows(), tmp_path / "here", keep="full"):
        here(IDS, attention_mask=MASK)
        here(IDS)
    monkeypatch.setattr("tapscope.dumper.recording.attached_model.is_any_on_device", lambda tensors: True)
    device = SlowDevice()
    with torch.no_grad(), dumper_of(Rows(), tmp_path / "far", device, keep="full") as (dumper, collector, _):
        ids = IDS.clone()
        model = dumper._models.modules[0]
        assert model is not None
        model(ids, attention_mask=MASK)
        ids.zero_()  # static inputs are overwritten before the next step
        model(IDS)
        assert collector._queue.is_awaiting_device
    far, near = open_run(tmp_path / "far"), open_run(tmp_path / "here")
    assert _steps(far) == _steps(near)
    assert _steps(far)[0][2] == (3, 4, 5, 6, 7, 8)
    assert far.ledger().complete
    assert len(far.records) == len(near.records)
    assert [m.value for m in far.metrics() if m.name == "num_tokens"] == [6.0, 8.0]


class PackedSequences(nn.Module):
    """A Megatron model of packed sequences, whose bounds are on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, input_ids: torch.Tensor, position_ids: Any = None, packed_seq_params: Any = None) -> Any:
        return self.inner(torch.sin(input_ids[..., None] * torch.arange(1.0, 5.0)))


def test_d2h_worker_rows_of_packed_sequences_are_those_of_bounds_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_plugins", {})
    registry.add("torch", MegatronPlugin())
    monkeypatch.setattr(MegatronPlugin, "owns", lambda self, model: True)
    monkeypatch.setattr("tapscope.dumper.recording.attached_model.is_any_on_device", lambda tensors: True)
    device = SlowDevice()
    ids, bounds = torch.tensor([[2, 3, 4, 0, 5, 6, 7, 8]]), torch.tensor([0, 3, 7])
    params = SimpleNamespace(cu_seqlens_q=bounds.clone(), cu_seqlens_q_padded=torch.tensor([0, 4, 8]))
    with torch.no_grad(), dumper_of(PackedSequences(), tmp_path / "far", device, keep="full") as (dumper, _, _):
        model = dumper._models.modules[0]
        assert model is not None
        model(ids, position_ids=torch.arange(8)[None], packed_seq_params=params)
        params.cu_seqlens_q.zero_()
    ((line,),) = (list(lines.values()) for lines in open_run(tmp_path / "far").steps.values())
    assert [(r.request, r.position, r.count, r.slot) for r in line.info.rows] == [("0", 0, 3, 0), ("1", 0, 4, 4)]
    assert (line.info.grid, tuple(line.info.token_ids)) == ((1, 8), (2, 3, 4, 5, 6, 7, 8))


def _vllm_steps(model: nn.Module, dumper: Dumper) -> list[int]:
    """Run steps of vLLM under asynchronous scheduling, whose buffers are overwritten after each step.

    Request a has 2 drafts in each step; vLLM counts them as accepted until it learns that they were rejected. Returns
    the first position of each step as it was known in the step.
    """
    known = []
    batch = SimpleNamespace(req_ids=["a"], num_computed_tokens_cpu=np.zeros(1, np.int32))
    config = SimpleNamespace(async_scheduling=True)
    runner = SimpleNamespace(input_batch=batch)
    worker = SimpleNamespace(speculative_config=object(), scheduler_config=config, model_runner=runner)
    session = vllm.WorkerSession(worker)
    session._dumper = dumper
    vllm._sessions[model] = weakref.ref(session)
    ids, positions = torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long)
    for counted, exact, count in ((0, 0, 2), (0, 0, 4), (4, 4, 3), (7, 5, 3), (8, 8, 3)):
        is_new = not counted
        session._forget(["a"] if is_new else [])  # the second request reuses the id of the first one
        batch.num_computed_tokens_cpu[0] = counted
        ids[:count], positions[:count] = torch.arange(count) + 10, torch.arange(count) + exact
        drafts = {} if is_new else {"a": [-1, -1]}
        session._begin(
            SimpleNamespace(
                num_scheduled_tokens={"a": count}, total_num_scheduled_tokens=count, scheduled_spec_decode_tokens=drafts
            )
        )
        model(input_ids=ids, positions=positions)
        assert dumper.current_step is not None
        known.append(dumper.current_step.rows[0].position)
        session._end(None)
        ids.zero_()
        positions.zero_()
    if dumper.config.flight_recorder_steps:
        dumper.release()
    return known


class PackedTokens(nn.Module):
    """A model with the arguments of vLLM's models."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids.float())


@pytest.mark.parametrize("num_kept", [0, 2], ids=["all steps", "the last steps"])
def test_d2h_worker_rows_of_vllm_with_rejected_drafts_are_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_kept: int
) -> None:
    settings: dict[str, Any] = {"keep": "full", "flight_recorder_steps": num_kept}
    monkeypatch.setattr(registry, "_plugins", {})
    registry.add("torch", vllm.VllmPlugin())
    monkeypatch.setattr(vllm.VllmPlugin, "owns", lambda self, model: True)
    with torch.no_grad(), Dumper(model := PackedTokens(), tmp_path / "here", **settings) as dumper:
        assert _vllm_steps(model, dumper) == [0, 0, 4, 5, 8]
    monkeypatch.setattr("tapscope.dumper.recording.attached_model.is_any_on_device", lambda tensors: True)
    device, model = SlowDevice(), PackedTokens()
    with torch.no_grad(), dumper_of(model, tmp_path / "far", device, **settings) as (dumper, _, _):
        assert _vllm_steps(model, dumper) == [0, 0, 4, 7, 8]
    far, near = open_run(tmp_path / "far"), open_run(tmp_path / "here")
    assert _steps(far) == _steps(near)
    assert far.ledger().complete
    rows = [(r.position, r.count, r.visit) for _, spans, _, _ in _steps(far) for r in spans]
    assert rows[-3:] == [(5, 2, 1), (7, 1, 0), (8, 3, 0)]
    assert rows[:-3] == ([] if num_kept else [(0, 2, 0), (0, 4, 0), (4, 3, 0)])


def test_late_rows_report_values_that_tell_no_rows(tmp_path: Path) -> None:
    device, outline, problems = SlowDevice(), StepInfo(step=0, grid=(3,)), list[Exception]()
    device.gate.set()
    with dumper_of(Rows(), tmp_path / "run", device) as (_, _, worker):
        tensors, steps = {"ids": torch.tensor([3, 4, 5])}, []
        for divisor in (0, 1):
            complete = lambda info, values, by=divisor: replace(info, token_ids=values["ids"].tolist()[:: 1 // by])  # noqa: E731
            late = LateRows(worker, tensors, outline, complete, problems.append)
            late.wait()
            steps.append(late.info)
    assert steps == [outline, replace(outline, token_ids=[3, 4, 5])]
    assert [type(each) for each in problems] == [ZeroDivisionError]


def test_d2h_worker_injection_waits_for_the_rows_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad(), Dumper(here := Rows(), tmp_path / "here", keep="full"):
        expected = here(IDS, attention_mask=MASK)
    monkeypatch.setattr("tapscope.dumper.recording.attached_model.is_any_on_device", lambda tensors: True)
    device, model = SlowDevice(), Rows()
    model.inner = nn.Tanh()  # simulates a bug
    settings: dict[str, Any] = {"keep": "full", "inject": ["inner:out"], "inject_from": str(tmp_path / "here")}
    with torch.no_grad(), dumper_of(model, tmp_path / "far", device, **settings):
        threading.Timer(0.2, device.gate.set).start()
        found = model(IDS, attention_mask=MASK)
    assert torch.equal(found, expected)


class Sketched(nn.Module):
    """Outputs sketched by rows and by columns, with other rows than the step's, in another order, and of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.still, self.turned, self.whole = (nn.Identity() for _ in range(4))

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, position_ids: Any = None
    ) -> torch.Tensor:
        states = self.wide(torch.sin(input_ids[..., None] * torch.arange(1.0, 301.0)))
        self.turned(states.transpose(1, 2))
        self.whole(input_ids + 1)
        return self.still(states[0, 0, :7])


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("positions", [None, torch.tensor([[5, 6, 7, 9]])])
def test_d2h_worker_sketches_computed_on_the_device_are_those_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: Any, positions: Any
) -> None:
    pytest.importorskip("triton")
    settings: dict[str, Any] = {"keep": "off", "rules": ["*:out*=sketch"]}
    with torch.no_grad(), Dumper(here := Sketched(), tmp_path / "here", **settings):
        here(IDS, attention_mask=mask, position_ids=positions)
    monkeypatch.setattr("tapscope.dumper.recording.attached_model.is_any_on_device", lambda tensors: True)
    device = SketchDevice()
    with torch.no_grad(), dumper_of(Sketched(), tmp_path / "far", device, **settings) as (dumper, _, _):
        model = dumper._models.modules[0]
        assert model is not None
        model(IDS, attention_mask=mask, position_ids=positions)
    assert not any(dtype.is_floating_point for dtype in device.copied)
    far, near = open_run(tmp_path / "far"), open_run(tmp_path / "here")
    assert far.ledger().complete
    found, wanted = ({r.key.site: r for r in run.records} for run in (far, near))
    assert found.keys() == wanted.keys() == {":out", "wide:out", "turned:out", "whole:out", "still:out"}
    for site, record in found.items():
        other = wanted[site]
        assert record.sketch is not None
        assert other.sketch is not None
        assert record.sketch.by_rows == other.sketch.by_rows == (site in ("wide:out", "whole:out"))
        assert (record.hash, record.shape) == (other.hash, other.shape)
        np.testing.assert_allclose(far.sketch(record), near.sketch(other), rtol=1e-5, atol=1e-4, err_msg=site)


class Last(nn.Module):
    """An output with some of the step's rows, such as the logits of prompts."""

    tap_rows: ClassVar = {"out": "last"}

    def __init__(self, rows: tuple[int, ...]) -> None:
        super().__init__()
        self.rows = list(rows)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[self.rows]


@pytest.mark.parametrize("rows", [(1, 5, 6), (6, 1, 1), (3, 4, 5), (2,)])
@pytest.mark.parametrize("is_ahead", [True, False])
def test_d2h_worker_sketches_of_scattered_rows_are_computed_on_the_device(
    tmp_path: Path, rows: tuple[int, ...], is_ahead: bool
) -> None:
    pytest.importorskip("triton")
    device = SketchDevice()
    info = StepInfo(
        step=0, grid=(7,), rows=(RowSpan("a", 3, 2, 0, 0), RowSpan("b", 0, 5, 0, 2)), row_sets={"last": rows}
    )
    noise = torch.Generator().manual_seed(1)
    several = [torch.randn(7, 300, generator=noise) for _ in range(3)]
    run = tmp_path / "run"
    with torch.no_grad(), dumper_of(Last(rows), run, device, keep="off", rules=[":out=sketch"]) as (dumper, _, _):
        for number, hidden in enumerate(several):
            step = replace(info, step=number)
            if is_ahead:
                complete = dumper.before_step_ahead(step)
            else:
                dumper.before_step(replace(step, token_ids=tuple(range(7))))
            _call(dumper, hidden)
            dumper.after_step({})
            if is_ahead:
                complete(replace(step, token_ids=tuple(range(7))))
    assert device.copied == []
    made = open_run(run)
    assert made.ledger().complete
    keys = row_keys(info)
    index = sketch_index((len(rows), 300), keys, slots=slots_as_ranges(rows))
    assert isinstance(index, SketchIndex)
    assert len(index.keys) == len(rows)
    assert len(made.records) == 3
    for record, hidden in zip(made.records, several, strict=True):
        assert record.rows == slots_as_ranges(rows)
        values = hidden[list(rows)]
        wanted = sketch.sketch(values.data_ptr(), "float32", index)
        np.testing.assert_allclose(made.sketch(record), wanted, rtol=1e-5, atol=1e-4)
    assert {m.value for m in made.metrics() if m.name == "host_sketch_bytes"} == {0}


def test_d2h_worker_rejects_rows_out_of_range_before_the_device_reads_them() -> None:
    with pytest.raises(IndexError, match="no row 7 in a step of 7 rows"):
        keys_at(torch.arange(7), torch.tensor([2, 7]))


class Packed(nn.Module):
    """Outputs as in the engine's models: by token rows, of integers, and with other rows than the step's."""

    def __init__(self) -> None:
        super().__init__()
        self.logits, self.tokens, self.whole = (nn.Identity() for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.tokens(hidden.argmax(-1))
        self.whole(hidden[0])
        return self.logits(hidden)


AHEAD_ROWS = RowSpan("a", 7, 1, 0, 0), RowSpan("b", 0, 1, 0, 1), RowSpan("c", 3, 1, 0, 2)


def _sketched_ahead(run: Path, device: SketchDevice, rows: tuple[RowSpan, ...], *, has_come: bool) -> Any:
    """Run three steps opened before their tokens are known; the second one turns out to have only ``rows``.

    ``has_come``: the tokens arrive before the values that the host sketches.
    """
    hidden = torch.randn(3, 300, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), dumper_of(Packed(), run, device, keep="off", rules=["*:out=sketch"]) as (dumper, _, drain):
        for number in range(3):
            info = StepInfo(step=number, phase="decode", grid=(3,), rows=AHEAD_ROWS)
            complete = dumper.before_step_ahead(info)
            _call(dumper, hidden)
            dumper.after_step({})
            kept = rows if number == 1 else AHEAD_ROWS
            if not has_come:
                device.gate.set()
                wait_until(lambda: not drain.staging.num_pending, "the copies")
                device.gate.clear()
            complete(replace(info, rows=kept, token_ids=tuple(range(len(kept)))))
    return open_run(run)


@pytest.mark.parametrize("has_come", [True, False])
def test_d2h_worker_sketches_of_steps_launched_ahead_are_computed_on_the_device(tmp_path: Path, has_come: bool) -> None:
    pytest.importorskip("triton")
    device = SketchDevice()
    run = _sketched_ahead(tmp_path / "run", device, AHEAD_ROWS[1:], has_come=has_come)
    assert set(device.copied) == {torch.int64}
    assert run.ledger().complete
    records = {(r.key.step, r.key.site): r for r in run.records}
    assert len(records) == 3 * 4
    hidden = torch.randn(3, 300, generator=torch.Generator().manual_seed(1))
    keys = row_keys(StepInfo(step=0, grid=(3,), rows=AHEAD_ROWS))
    by_site = {":out": hidden, "logits:out": hidden, "whole:out": hidden[0], "tokens:out": hidden.argmax(-1)}
    for (step, site), record in records.items():
        assert record.stats is not None
        if step == 1 and site != "whole:out" and not (site == "tokens:out" and has_come):
            assert record.sketch is record.entry is None, (step, site)  # one of its rows is not a row of the step
            continue
        values = by_site[site]
        index = sketch_index(values.shape, None if site == "whole:out" else keys)
        if step == 1 and site == "tokens:out":  # the rows were known when the host computed the sketch
            index = sketch_index(values.shape, row_keys(run.steps[1][0].info))
        assert isinstance(index, SketchIndex)
        wanted = sketch.sketch(values.contiguous().data_ptr(), record.dtype or "", index)
        np.testing.assert_allclose(run.sketch(record), wanted, rtol=1e-5, atol=1e-4, err_msg=str((step, site)))
    left_out = [m.value for m in run.metrics() if m.name == "num_sketches_left_out"]
    assert left_out == [0, 2 if has_come else 3, 0]
    assert [m.value for m in run.metrics() if m.name == "host_sketch_bytes"] == [3 * 8] * 3


def test_d2h_worker_sketches_of_a_device_that_fails_are_counted(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    device = SketchDevice()
    device.problem = "an illegal address"
    with torch.no_grad(), dumper_of(nn.Identity(), tmp_path / "run", device, keep="sketch") as (dumper, _, _):
        model = dumper._models.modules[0]
        assert model is not None
        model(torch.ones(2, 300))
    run = open_run(tmp_path / "run")
    assert not run.records
    assert (run.ledger().failed, run.ledger().dropped) == (2, 0)


def test_d2h_worker_rows_of_a_device_that_fails_are_reported_as_far_as_shapes_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tapscope.dumper.recording.attached_model.is_any_on_device", lambda tensors: True)
    device = SlowDevice()
    device.problem = "an illegal address"
    with torch.no_grad(), dumper_of(Rows(), tmp_path / "run", device, keep="full") as (dumper, _, _):
        model = dumper._models.modules[0]
        assert model is not None
        model(IDS)
    run = open_run(tmp_path / "run")
    (step,) = _steps(run)
    grid, rows, ids, _ = step
    assert (grid, [row.count for row in rows], ids) == ((2, 4), [4, 4], ())
    assert not run.ledger().complete


@pytest.mark.parametrize(("num_pending", "is_overdue"), [(0, False), (1, True)])
def test_d2h_worker_wait_for_late_rows_ends_when_no_copy_comes(num_pending: int, is_overdue: bool) -> None:
    """If no copy is pending, or the device makes no progress, the step keeps its outline."""
    pending = SimpleNamespace(num_pending=num_pending)
    worker: Any = SimpleNamespace(
        start=lambda *args, **options: None, hurry=lambda: None, is_overdue=is_overdue, staging=pending
    )
    outline = StepInfo(step=0)
    late = LateRows(worker, {"ids": torch.tensor([3])}, outline, lambda info, values: info, print)
    late.wait()
    assert late.info is outline
