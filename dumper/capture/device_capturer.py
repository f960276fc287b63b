"""DeviceCapturer: records tensors of an accelerator without synchronizing with the device."""

import functools
import threading
from collections.abc import Callable

import torch

from tapscope.dumper.capture.record_queue import RecordQueue
from tapscope.dumper.capture.rule_evaluator import RuleEvaluator
from tapscope.dumper.device.async_copy import AsyncCopy
from tapscope.dumper.device.d2h_worker import D2HWorker, read_sketch
from tapscope.dumper.device.device import CopyHandle, CudaDevice
from tapscope.dumper.device.device_row_keys import DeviceRowKeys, are_preliminary, keys_at
from tapscope.dumper.device.device_stats import SketchRequest
from tapscope.dumper.device.graph_fetch import fetch_here
from tapscope.dumper.device.graph_memory import ROW_BYTES
from tapscope.dumper.pipeline.send_queue import SendQueue
from tapscope.dumper.records import sketcher
from tapscope.dumper.records.firing import Firing, rule_context
from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.records.record_layout import RecordLayout
from tapscope.dumper.records.site_port import DeviceSketch, SitePort
from tapscope.dumper.records.sketcher import DevicePlace, SketchCopy, Sketcher
from tapscope.dumper.retention.step_counters import StepCounters
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.kernels.native import sketch
from tapscope.run_format.sketch import NBYTES


class DeviceCapturer:
    """Queues each record immediately; a :class:`D2HWorker` adds its statistics and bytes once they have arrived.

    The worker is created for the first device tensor, or earlier if device tensors are expected.
    """

    def __init__(
        self,
        queue: SendQueue,
        records: RecordQueue,
        rules: RuleEvaluator,
        counters: StepCounters,
        sketcher: Sketcher,
    ) -> None:
        self._sketcher = sketcher
        self._queue = queue
        self._records = records
        self._rules = rules
        self._counters = counters
        self.row_keys = DeviceRowKeys()
        """Row keys of the open step in device memory."""
        self._limit = 0
        self._host_sketch_bytes = 0
        self._lock = threading.Lock()
        self.running: D2HWorker | None = None
        """The worker; None before its creation."""

    # ---- the worker

    def worker(self) -> D2HWorker:
        """Return the worker, created on the first call."""
        if self.running is None:
            with self._lock:
                if self.running is None:
                    self.running = D2HWorker(CudaDevice(), self._queue, self._limit, self._counters.count_lost_copy)
        return self.running

    def resize(self, limit: int, *, soon: bool) -> None:
        """Limit staging memory to ``limit`` bytes; with ``soon``, start the worker for tensors expected shortly."""
        self._limit = limit
        if self.running is not None:
            self.running.resize(limit)
        elif soon and isinstance(self._queue, SendQueue) and _uses_cuda():
            self.worker().prepare()

    def end_step(self) -> dict[str, int]:
        """Start the remaining copies of the step that ends; returns metrics of the step."""
        if self.running is None:
            return {}
        self.running.end_step()
        metrics = {"num_direct_copies": self.running.take_num_direct()}
        if self._sketcher.is_wanted:
            metrics["host_sketch_bytes"], self._host_sketch_bytes = self._host_sketch_bytes, 0
        return metrics

    def close(self) -> None:
        """Wait for pending copies and end the worker."""
        if self.running is not None:
            self.running.close()

    # ---- tensors

    def record(
        self, port: SitePort, firing: Firing, tensor: torch.Tensor, layout: RecordLayout, *, full: bool, sketch: bool
    ) -> None:
        """Queue a record with the statistics of ``tensor``.

        With ``full``, or if a trigger asks for it, the record includes the bytes; with ``sketch``, the sketch. At a
        site with triggers, the bytes replace the sketch.
        """
        has_triggers = port.decision.triggers is not None
        if sketch and not has_triggers:
            self._record_sketch(port, firing, tensor, layout)
            return
        full = full or sketch
        if not full and not has_triggers and self._record_stats(port, firing, tensor, layout):
            return
        sink = self._counters.sink
        slot = sink.reserve(layout.nbytes)
        if slot is None:
            self._counters.count(firing.step, dropped=1)
            return
        holds = full or has_triggers  # the record owns the slot, because its bytes are or may be kept
        context = rule_context(tensor, firing) if has_triggers else None

        def on_stats(stats: bytes) -> bool:
            assert context is not None
            return self._rules.run_triggers(port, firing, layout, stats, lambda: context) or full

        copy = self._start(tensor, layout, slot, holds=holds, on_stats=on_stats if has_triggers else None)
        self._put(port, firing, layout, copy, slot if holds else None)

    def watch(self, port: SitePort, firing: Firing, tensor: torch.Tensor, layout: RecordLayout) -> None:
        """Evaluate triggers on a tensor that no rule keeps; record it in full if a trigger asks for it."""
        slot = self._counters.sink.reserve(layout.nbytes)
        if slot is None:
            return
        context = rule_context(tensor, firing)

        def on_stats(stats: bytes) -> bool:
            if not self._rules.run_triggers(port, firing, layout, stats, lambda: context):
                return False
            if not port.announced:
                self._records.announce(port)
            if firing.step.ended:
                self._counters.mark_late(firing.step)
            self._records.put(self._records.new_record(port, firing, layout, stats, slot))
            return True

        self._start(tensor, layout, slot, holds=False, on_stats=on_stats)

    def _record_sketch(self, port: SitePort, firing: Firing, tensor: torch.Tensor, layout: RecordLayout) -> None:
        """Record a sketch, computed on the device if possible, otherwise by the worker from a host copy."""
        fetch, place = fetch_here(), self._sketcher.place_on_device(port, firing.step, layout)
        if fetch is not None:
            if fetch.is_sketched(tensor):
                self._sketch_in_graph(
                    port, firing, tensor, layout, fetch.sketch_handle_of(tensor, firing.step.info, place)
                )
                return
            place = None
        if place is not None and self._sketch_on_device(port, firing, tensor, layout, place):
            return
        sink, step = self._counters.sink, firing.step
        slot, counters = sink.reserve(layout.nbytes), sink.reserve(NBYTES)
        if slot is None or counters is None:
            for each in (slot, counters):
                if each is not None:
                    sink.cancel(each)
            self._counters.count(step, dropped=1)
            return
        copy, address = sketcher.SketchCopy(sink.cancel), slot.address
        if are_preliminary(step):
            self._note_ahead(copy, step)

        def on_stats(stats: bytes) -> bool:
            is_final = step.late_rows is None or step.late_rows.is_ready
            index = self._sketcher.index(port, step, layout)
            if copy.ahead_of is not None and (is_final or index is None or not index.by_rows):
                copy.ahead_of = None
                self._counters.count_sketches_ahead(step, -1)
            if index is not None:
                copy.taken = index.by_rows, sketch.sketch(address, layout.dtype, index)
            return False

        try:
            copy.inner = self._start(tensor, layout, slot, holds=False, on_stats=on_stats)
        except BaseException:
            sink.cancel(counters)
            raise
        self._host_sketch_bytes += layout.nbytes
        self._put_sketch(port, firing, layout, copy, counters)

    def _sketch_on_device(
        self, port: SitePort, firing: Firing, tensor: torch.Tensor, layout: RecordLayout, place: DevicePlace
    ) -> bool:
        """Record a sketch and statistics computed on the device, without copying the tensor.

        Returns False, with no effect, if the device cannot compute the sketch.
        """
        keys = self.row_keys.of(firing.step if place.by_rows else None, tensor.device)
        if keys is None:
            return False
        sink, by_rows = self._counters.sink, place.by_rows
        slot = sink.reserve(NBYTES)
        if slot is None:
            self._counters.count(firing.step, dropped=1)
            return True
        copy = sketcher.SketchCopy(sink.cancel)

        def taken(address: int) -> None:
            copy.taken = by_rows, sketcher.counters_at(address)

        try:
            keys = keys[place.slot :] if place.slots is None else keys_at(keys, place.slots)
            request = SketchRequest(keys, place.part)
            copy.inner = self.worker().sketch(tensor, layout, request, taken)
        except BaseException:
            sink.cancel(slot)
            raise
        if copy.inner is None:
            sink.cancel(slot)
            return False
        if by_rows and are_preliminary(firing.step):
            self._note_ahead(copy, firing.step)
        if place.slots is None:
            port.device_sketch = DeviceSketch(layout.members, sketcher.grid_of(firing.step.info), place)
        self._put_sketch(port, firing, layout, copy, slot)
        return True

    def _sketch_in_graph(
        self,
        port: SitePort,
        firing: Firing,
        tensor: torch.Tensor,
        layout: RecordLayout,
        replayed: tuple[CopyHandle, int] | None,
    ) -> None:
        """Record the statistics and the sketch computed by a CUDA graph replay.

        ``replayed`` is (handle of the statistics, host address of the counters). If it is None, the sketch is unusable,
        for example because it covers other rows, and only the statistics are recorded. The sketch is also left out if
        the step turns out to have fewer rows than the replay computed.
        """
        step, sink = firing.step, self._counters.sink
        if replayed is None:
            self._counters.report(port.site, "kept as statistics: the graph's sketch is of other rows", step)
            self._record_stats(port, firing, tensor, layout)
            return
        slot = sink.reserve(NBYTES)
        if slot is None:
            self._counters.count(step, dropped=1)
            return
        copy = sketcher.SketchCopy(sink.cancel)
        copy.place = ROW_BYTES

        def taken(address: int) -> None:
            copy.taken = True, sketcher.counters_at(address)

        try:
            copy.inner = self.worker().fetched(layout, replayed[0], functools.partial(read_sketch, taken, replayed[1]))
        except BaseException:
            sink.cancel(slot)
            raise
        if are_preliminary(step):
            self._note_ahead(copy, step)
        self._put_sketch(port, firing, layout, copy, slot)

    def _note_ahead(self, copy: SketchCopy, step: OpenStep) -> None:
        """Note that the sketch is computed for preliminary rows of ``step``."""
        copy.ahead_of = step
        self._counters.count_sketches_ahead(step, 1)

    def _put_sketch(
        self, port: SitePort, firing: Firing, layout: RecordLayout, copy: SketchCopy, slot: PayloadSlot
    ) -> None:
        record = self._records.new_record(port, firing, layout, b"", slot)
        record.stored, record.pending_copy = sketcher.SKETCH_LAYOUT, copy
        self._records.put(record)

    def _record_stats(self, port: SitePort, firing: Firing, tensor: torch.Tensor, layout: RecordLayout) -> bool:
        """Record statistics computed on the device, without copying the tensor; False if the device cannot."""
        row = self.worker().summarize(tensor, layout)
        if row is None:
            return False
        self._put(port, firing, layout, row, None)
        return True

    def _start(
        self,
        tensor: torch.Tensor,
        layout: RecordLayout,
        slot: PayloadSlot,
        *,
        holds: bool,
        on_stats: Callable[[bytes], bool] | None,
    ) -> AsyncCopy:
        sink = self._counters.sink
        if tensor.requires_grad:
            tensor = tensor.detach()
        try:
            return self.worker().start(tensor, layout, slot, None if holds else sink.cancel, on_stats)
        except BaseException:
            sink.cancel(slot)
            raise

    def _put(
        self, port: SitePort, firing: Firing, layout: RecordLayout, copy: AsyncCopy, slot: PayloadSlot | None
    ) -> None:
        record = self._records.new_record(port, firing, layout, b"", slot)
        record.pending_copy = copy
        self._records.put(record)


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
