"""Capturer: applies the rules to each value, and records its dense tensors on the host or on the device."""

import functools
from typing import Any

import torch

from tapscope.core.observe import StepInfo
from tapscope.dumper.capture.device_capturer import DeviceCapturer
from tapscope.dumper.capture.host_capturer import HostCapturer
from tapscope.dumper.capture.native_record_writer import NativeRecordWriter
from tapscope.dumper.capture.pending_collectives import CollectivePending, PendingCollectives
from tapscope.dumper.capture.record_queue import RecordQueue
from tapscope.dumper.capture.rule_evaluator import RuleEvaluator
from tapscope.dumper.capture.tensor_unwrap import DenseTensor, unwrap
from tapscope.dumper.device.device_row_keys import are_preliminary
from tapscope.dumper.device.graph_fetch import ONLY_STATISTICS, Fetch, fetch_here
from tapscope.dumper.pipeline.in_memory_sink import InMemorySink
from tapscope.dumper.pipeline.send_queue import SendQueue
from tapscope.dumper.records.dedup_cache import DedupCache
from tapscope.dumper.records.firing import Firing
from tapscope.dumper.records.flatten import plain_value
from tapscope.dumper.records.record_layout import NO_LAYOUT, RecordLayout
from tapscope.dumper.records.record_lines import LinePayload, PendingLines, leave_out_sketches
from tapscope.dumper.records.replay_plan import ReplayPlan
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.records.sketcher import Sketcher
from tapscope.dumper.records.snapshot import is_plain
from tapscope.dumper.reference.live_comparison import LiveComparison, Values
from tapscope.dumper.reference.row_comparer import array_at, copied_array
from tapscope.dumper.retention.retention_policy import RetentionPolicy
from tapscope.dumper.retention.step_counters import StepCounters
from tapscope.dumper.selection.selection import CaptureSpec
from tapscope.dumper.steps.row_slicing import SlicedTensor, rows_per_token
from tapscope.run_format.ledger import encode_line

_FULL = CaptureSpec("full")


class Capturer:
    """Captures the values of one rank. The methods called from hooks never raise."""

    def __init__(self, queue: SendQueue, retention: RetentionPolicy, counters: StepCounters) -> None:
        self._queue = queue
        self._retention = retention
        self._counters = counters
        self.dedup = dedup = DedupCache()
        self._rules = rules = RuleEvaluator(retention, counters)
        self._records = records = RecordQueue(queue, retention, counters, dedup)
        self.sketcher = Sketcher(counters.report)
        self._host = HostCapturer(records, rules, counters, dedup, self.sketcher)
        self.device = DeviceCapturer(queue, records, rules, counters, self.sketcher)
        self.native = NativeRecordWriter(queue, records, counters, dedup, self.device)
        self._pending = PendingCollectives(counters)
        self._comparison: LiveComparison | None = None
        self.memory_sinks: list[InMemorySink] = []
        """Destinations that currently replace the run; empty to record into the run."""

    @property
    def comparison(self) -> LiveComparison | None:
        """Live comparison of values with a reference run; set before the first step."""
        return self._comparison

    @comparison.setter
    def comparison(self, comparison: LiveComparison) -> None:
        self._comparison, self.native.diverges = comparison, self._diverges_at

    # ---- runs and steps

    def restart(self) -> None:
        """Start a new run: number records from 0 and announce sites again."""
        self.native.end()
        self._records.restart()

    def begin(self, first: Firing) -> None:
        """Begin a step; ``first`` is shared by all untagged sites that fire for the first time in the step."""
        self.dedup.clear()
        is_plain_step = not (self.memory_sinks or first.step.skipped or self._retention.is_limited)
        if is_plain_step and self._counters.sink is self._queue:
            self.native.begin(first)

    def end(self) -> None:
        """Settle pending values and flush the native writer at the end of a step or run."""
        self.settle(last=True)
        self.native.end()

    def redirect(self, sinks: list[InMemorySink]) -> None:
        """Send values to ``sinks``, or to the run again if ``sinks`` is empty."""
        self.settle(last=True)
        self.memory_sinks = sinks
        self.native.end()

    # ---- values

    def capture(self, port: SitePort, leaf: Any, firing: Firing) -> None:
        """Record one value at ``port`` if the rules select it; never raises.

        A value whose step has ended (such as a gradient) counts as late.
        """
        try:
            step = firing.step
            if step.info.num_padding:
                leaf = _without_padding(port, leaf, step.info)
            if self.memory_sinks:
                self._capture_in_memory(port, leaf, firing)
                return
            is_ordinary = not (step.in_full or step.halted)
            if is_ordinary and firing is self.native.firing and port.announced and self.native.write(port, leaf):
                return
            if step.ended:
                self._counters.mark_late(step)
            if not is_ordinary or port.keep is None or not is_plain(leaf):
                self._capture_by_rules(port, leaf, firing)
                return
            layout = port.latest
            rows = port.rows_in(step)
            if layout.torch_dtype is not leaf.dtype or layout.torch_shape != leaf.shape or layout.rows != rows:
                layout = port.layout(SlicedTensor(leaf, rows), None, self._counters.report_dims)
            self._record(port, firing, leaf, layout, full=port.keep == "full", sketch=port.keep == "sketch")
        except CollectivePending as error:
            self._pending.add(port, leaf, firing, error, self._records.next_number())
        except Exception as error:  # noqa: BLE001 - the model must go on
            self._counters.fail(firing.step, port.site, error)

    @property
    def is_plain(self) -> bool:
        """Whether values go directly to the run: no memory sinks, no budgets, and no pending collectives."""
        return not (self.memory_sinks or self._retention.is_limited or self._pending)

    def put_replay(self, plan: ReplayPlan, firing: Firing, fetch: Fetch) -> bool:
        """Queue the records of a CUDA graph replay as one item; False if they were dropped. Device errors propagate."""
        records, step, queue = self._records, firing.step, self._queue
        is_packed = queue.takes_blocks and plan.block_bytes > 0
        sizes = [plan.block_bytes] if is_packed else [payload.layout.nbytes for payload in plan.payloads]
        slots = queue.reserve_all(sizes)
        if slots is None:
            return False
        block = slots[0] if is_packed else None
        payloads = (
            []
            if is_packed
            else [
                (line, self.dedup.next_number(), LinePayload(port, layout, slot))
                for (line, port, layout, *_), slot in zip(plan.payloads, slots, strict=True)
            ]
        )
        with records.lock:
            records.flush_native()
            number = records.next_numbers(len(plan.sites))
            step_and_number = str(step.info.step), number
            make = (
                functools.partial(plan.pack, *step_and_number, block)
                if block
                else functools.partial(plan.lines, *step_and_number, slots)
            )
            try:
                copy = self.device.worker().start_lines(NO_LAYOUT, fetch.whole, slots, make)
            except BaseException:
                for slot in slots:
                    queue.cancel(slot)
                raise
            sketched = plan.sketch_lines if are_preliminary(step) else ()
            self._counters.count_sketches_ahead(step, len(sketched))
            amend = functools.partial(leave_out_sketches, sketched, queue.cancel) if sketched else None
            lines = PendingLines(step, plan.sites, copy, self.dedup.generation, payloads, amend, block)
            return queue.put_lines(lines)

    def settle(self, *, last: bool = False) -> None:
        """Record pending values whose collectives have completed; with ``last``, the rest count as failed."""
        if self._pending:
            self._pending.settle(self._capture_late, last=last)

    def _capture_late(self, port: SitePort, leaf: Any, firing: Firing, number: int) -> None:
        """Capture a value that waited for its collective; its record gets the reserved ``number``. Never raises."""
        try:
            with self._records.reusing(number):
                if firing.step.ended:
                    self._counters.mark_late(firing.step)
                (self._capture_in_memory if self.memory_sinks else self._capture_by_rules)(port, leaf, firing)
        except Exception as error:  # noqa: BLE001 - the model must go on
            self._counters.fail(firing.step, port.site, error)

    def _capture_in_memory(self, port: SitePort, leaf: Any, firing: Firing) -> None:
        spec = port.decision.static or self._rules.decide(port, leaf, firing)
        if spec.keep != "off":
            for sink in self.memory_sinks:
                sink.add(port, leaf, firing, spec)

    def _capture_by_rules(self, port: SitePort, leaf: Any, firing: Firing) -> None:
        """Capture a value outside the fast path: not a plain tensor, conditional rules, partial capture, or halted."""
        self.settle()
        step = firing.step
        spec = _FULL if step.in_full else port.decision.static or self._rules.decide(port, leaf, firing)
        if step.halted:
            self._counters.count(step, left_out=spec.keep != "off")
        elif spec.keep != "off":
            self._record_value(port, leaf, firing, spec)
        elif port.decision.triggers is not None and isinstance(leaf, torch.Tensor):
            self._watch(port, leaf, firing)

    def _record_value(self, port: SitePort, leaf: Any, firing: Firing, spec: CaptureSpec) -> None:
        """Record a value, or each part of an unusual tensor separately; a failing part does not affect the others."""
        if not isinstance(leaf, torch.Tensor):
            if not port.announced:
                self._records.announce(port)
            value = b'"value":' + encode_line(plain_value(leaf))
            self._records.put(self._records.new_record(port, firing, NO_LAYOUT, value))
            return
        unwrapped = DenseTensor(leaf) if is_plain(leaf) else unwrap(leaf)
        if isinstance(unwrapped, DenseTensor):
            self._record_tensor(port, unwrapped, firing, spec)
            return
        for name, part in unwrapped:
            part_port = port.part_of(name)
            try:
                self._record_value(part_port, part, firing, CaptureSpec(spec.keep, cap=spec.cap))
            except Exception as error:  # noqa: BLE001 - the other parts are still recorded
                self._counters.fail(firing.step, part_port.site, error)

    def _record_tensor(self, port: SitePort, dense: DenseTensor, firing: Firing, spec: CaptureSpec) -> None:
        """Record the rows of a dense tensor that ``spec`` keeps; only their statistics if they exceed its cap."""
        part = port.slice(dense.tensor, firing.step, spec)
        nbytes = part.tensor.numel() * part.tensor.element_size()
        full = spec.keep == "full" and (spec.cap is None or nbytes <= spec.cap)
        cap = spec.cap if spec.keep == "full" and not full else None
        layout = port.layout(part, cap, self._counters.report_dims, dense.placement)
        self._record(port, firing, part.tensor, layout, full=full, sketch=spec.keep == "sketch")

    def _record(
        self,
        port: SitePort,
        firing: Firing,
        tensor: torch.Tensor,
        layout: RecordLayout,
        *,
        full: bool,
        sketch: bool = False,
    ) -> None:
        if not port.announced:
            self._records.announce(port)
        is_compared = self.comparison is not None and fetch_here() is None
        if tensor.is_cuda and layout.count:
            if is_compared and self._diverges(port, firing, tensor, layout, None):
                full = '"cap":' not in layout.members
            if (full or sketch) and (fetch := fetch_here()) is not None and fetch.is_row(tensor):
                sketch = sketch and not full and fetch.is_sketched(tensor)
                full = False
                if not sketch:
                    self._counters.report(port.site, f"kept as statistics: {ONLY_STATISTICS}", firing.step)
            self.device.record(port, firing, tensor, layout, full=full, sketch=sketch)
        else:
            diverges = self._diverges if is_compared else None
            self._host.record(port, firing, tensor, layout, full=full, sketch=sketch, diverges=diverges)

    def _diverges(
        self, port: SitePort, firing: Firing, tensor: torch.Tensor, layout: RecordLayout, digest: bytes | None
    ) -> bool:
        """Compare a tensor with the reference run; returns whether the value must be kept in full."""

        def values() -> Any:
            is_direct = tensor.is_cpu and tensor.is_contiguous()
            return array_at(tensor.data_ptr(), layout) if is_direct else copied_array(tensor, layout)

        return self._check(port, firing, layout, values, digest)

    def _diverges_at(
        self, port: SitePort, firing: Firing, address: int, layout: RecordLayout, digest: bytes | None
    ) -> bool:
        """Compare a contiguous tensor at a host address with the reference run, see :meth:`_diverges`."""
        return self._check(port, firing, layout, lambda: array_at(address, layout), digest)

    def _check(
        self, port: SitePort, firing: Firing, layout: RecordLayout, values: Values, digest: bytes | None
    ) -> bool:
        assert self.comparison is not None
        divergence = self.comparison.check(port, firing, layout, values, digest)
        if divergence is None:
            return False
        self.native.flush()  # queue earlier records before the events of the divergence
        return self._retention.on_divergence(divergence, firing.step)

    def _watch(self, port: SitePort, leaf: torch.Tensor, firing: Firing) -> None:
        """Evaluate the triggers of a site on a tensor that no rule keeps."""
        try:
            dense = DenseTensor(leaf) if is_plain(leaf) else unwrap(leaf)
        except CollectivePending:
            raise
        except Exception as error:  # noqa: BLE001 - no rule selected the value, so it does not count as failed
            self._counters.report(port.site, f"cannot evaluate triggers on this tensor: {error}", firing.step)
            return
        if isinstance(dense, DenseTensor):
            layout = port.layout(SlicedTensor(dense.tensor), None, self._counters.report_dims, dense.placement)
            is_on_device = dense.tensor.is_cuda and layout.count
            (self.device if is_on_device else self._host).watch(port, firing, dense.tensor, layout)


def _without_padding(port: SitePort, leaf: Any, info: StepInfo) -> Any:
    """Return a packed tensor without the step's padding rows; any other value is returned unchanged."""
    rows = rows_per_token(leaf, port.dims, info) if isinstance(leaf, torch.Tensor) else None
    return leaf if rows is None else leaf[: info.grid[0] * rows]
