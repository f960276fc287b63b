"""Taker: one value of a site, from the rules to a record on its way. Nothing here may raise into the model."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tapscope.core.observe import StepInfo
from tapscope.dumper.capture.native_record_writer import NativeRecordWriter
from tapscope.dumper.capture.pending_collectives import CollectivePending, PendingCollectives
from tapscope.dumper.capture.rule_evaluator import RuleEvaluator
from tapscope.dumper.capture.tensor_unwrap import DenseTensor, unwrap
from tapscope.dumper.device.copy_tracker import CopyTracker
from tapscope.dumper.device.graph_memory import ONLY_STATISTICS, fetch_here
from tapscope.dumper.pipeline.in_memory_sink import InMemorySink
from tapscope.dumper.pipeline.send_queue import SendQueue
from tapscope.dumper.records import snapshot
from tapscope.dumper.records.dedup_cache import DedupCache
from tapscope.dumper.records.dtensor_dims import Placement
from tapscope.dumper.records.firing import Firing
from tapscope.dumper.records.flatten import plain_value
from tapscope.dumper.records.inflight_record import InflightRecord
from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.records.rule_context import rule_context
from tapscope.dumper.records.site_port import NO_LAYOUT, RecordLayout, SitePort
from tapscope.dumper.records.snapshot import TensorSnapshot
from tapscope.dumper.retention.retention_policy import RetentionPolicy
from tapscope.dumper.retention.step_counters import StepCounters
from tapscope.dumper.selection.selection import CaptureSpec
from tapscope.dumper.steps.row_slicing import SlicedTensor
from tapscope.run_format.ledger import encode_line

_FULL = CaptureSpec("full")


class Capturer:
    """Measures, copies and queues what the rules keep."""

    def __init__(self, queue: SendQueue, retention: RetentionPolicy, counters: StepCounters) -> None:
        self._backlog = queue
        self._keeper = retention
        self._account = counters
        self.dedup = DedupCache()
        self.device = CopyTracker(queue, counters)
        self.memory_sinks: list[InMemorySink] = []
        """Who takes what is recorded now, in memory; nothing then goes to the run."""
        self._announced_sites: set[str] = set()
        self._seq: Iterator[int] = itertools.count()
        self._rules = RuleEvaluator(retention, counters, self.dedup)
        self._pending = PendingCollectives(counters)
        self.native = NativeRecordWriter(queue, counters, self.dedup, self._send)

    def restart(self) -> None:
        """A new run begins: records are numbered from 0 and sites announced again."""
        self.native.end()
        self._seq = itertools.count()
        self._announced_sites.clear()

    def begin(self, first: Firing) -> None:
        """A step begins; ``first`` is the stamp of all that fire for the first time in it, without tags."""
        self.dedup.clear()
        is_plain_step = not (self.memory_sinks or first.step.skipped or self._keeper.is_limited)
        if is_plain_step and self._account.sink is self._backlog:
            self.native.begin(first, self._seq)

    def redirect(self, captures: list[InMemorySink]) -> None:
        """Hand what is recorded from now on to ``captures``, and to the run again where there are none."""
        self.settle(last=True)
        self.memory_sinks = captures
        self.native.end()

    def end(self) -> None:
        """The step ends, or the run."""
        self.settle(last=True)
        self.native.end()

    def capture(self, port: SitePort, leaf: Any, firing: Firing) -> None:
        """Record one value at ``port``, if the rules keep it; never raises.

        Its step may have ended (a gradient): the value is then counted as late.
        """
        try:
            step = firing.step
            if step.info.num_padding:
                leaf = _without_padding(port, leaf, step.info)
            if self.memory_sinks:
                self._redirect(port, leaf, firing)
                return
            may_pen = firing is self.native.firing and port.announced and not (step.in_full or step.halted)
            if may_pen and self.native.write(port, leaf):
                return
            if step.ended:
                self._account.mark_late(step)
            if port.keep is None or step.in_full or step.halted or not snapshot.is_plain(leaf):
                self._take_carefully(port, leaf, firing)
                return
            if not port.announced:
                self._announce_site(port)
            layout = port.latest
            rows = port.rows_in(step)
            if layout.torch_dtype is not leaf.dtype or layout.torch_shape != leaf.shape or layout.rows != rows:
                layout = port.layout(SlicedTensor(leaf, rows), None, self._account.report_dims)
            self._record(port, firing, leaf, layout, port.keep == "full")
        except CollectivePending as error:
            self._pending.add(port, leaf, firing, error, next(self._seq))
        except Exception as error:  # noqa: BLE001 - the model must go on
            self._account.fail(firing.step, port.site, error)

    def settle(self, *, last: bool = False) -> None:
        """Take what collectives have computed since it came here; with ``last`` what is left has failed."""
        if self._pending:
            self._pending.settle(self._take_late, last=last)

    def _take_late(self, port: SitePort, leaf: Any, firing: Firing, numbers: Iterator[int]) -> None:
        """As :meth:`take`, for a value that was held: its record has the first of ``numbers``."""
        after, self._seq = self._seq, itertools.chain(numbers, self._seq)
        try:
            if firing.step.ended:
                self._account.mark_late(firing.step)
            (self._redirect if self.memory_sinks else self._take_carefully)(port, leaf, firing)
        except Exception as error:  # noqa: BLE001 - the model must go on
            self._account.fail(firing.step, port.site, error)
        finally:
            self._seq = after

    def _redirect(self, port: SitePort, leaf: Any, firing: Firing) -> None:
        """A value for those who capture in memory."""
        spec = port.decision.static or self._rules.decide(port, leaf, firing)
        if spec.keep != "off":
            for each in self.memory_sinks:
                each.add(port, leaf, firing, spec)

    def _take_carefully(self, port: SitePort, leaf: Any, firing: Firing) -> None:
        """A value that is no ordinary tensor, or whose rule has conditions, or of which a part is kept."""
        self.settle()
        spec = _FULL if firing.step.in_full else port.decision.static or self._rules.decide(port, leaf, firing)
        if firing.step.halted:
            self._account.count(firing.step, left_out=spec.keep != "off")
        elif spec.keep != "off":
            self._take_as(port, leaf, firing, spec)
        elif port.decision.triggers is not None and isinstance(leaf, torch.Tensor):
            self._look(port, leaf, firing)

    def _look(self, port: SitePort, leaf: torch.Tensor, firing: Firing) -> None:
        """The rules keep nothing here, but a trigger asks: measured, and kept in full if that makes it fire."""
        try:
            found = DenseTensor(leaf) if snapshot.is_plain(leaf) else unwrap(leaf)
        except CollectivePending:
            raise
        except Exception as error:  # noqa: BLE001 - nothing is lost that was asked for
            self._account.report(port.site, f"no trigger can see it: {error}", firing.step)
            return
        if not isinstance(found, DenseTensor):
            return
        layout = port.layout(SlicedTensor(found.tensor), None, self._account.report_dims, found.placement)
        if found.tensor.is_cuda and layout.count:
            self._await(port, firing, found.tensor, layout, "off")
            return
        measured = snapshot.measure(found.tensor, layout, self.dedup)
        if self._rules.run_triggers(port, firing, found.tensor, layout, measured):
            if not port.announced:
                self._announce_site(port)
            self._send(port, firing, layout, snapshot.snapshot(found.tensor, layout, self.dedup, self._account.sink))

    def _take_as(self, port: SitePort, leaf: Any, firing: Firing, spec: CaptureSpec) -> None:
        """A value of which this is kept: as one record, or as the parts of an unusual tensor, which fail apart."""
        if isinstance(leaf, torch.Tensor):
            found = DenseTensor(leaf) if snapshot.is_plain(leaf) else unwrap(leaf)
            if isinstance(found, DenseTensor):
                self._record_part(port, firing, found.tensor, spec, found.placement)
                return
            for name, part in found:
                inner = port.part_of(name)
                try:
                    self._take_as(inner, part, firing, CaptureSpec(spec.keep, cap=spec.cap))
                except Exception as error:  # noqa: BLE001 - the other parts must go on
                    self._account.fail(firing.step, inner.site, error)
        else:
            if not port.announced:
                self._announce_site(port)
            text = b'"value":' + encode_line(plain_value(leaf))
            self._put(InflightRecord(port, firing, next(self._seq), NO_LAYOUT, text, self.dedup.generation))

    def _record_part(
        self, port: SitePort, firing: Firing, tensor: torch.Tensor, spec: CaptureSpec, placement: Placement | None
    ) -> None:
        if not port.announced:
            self._announce_site(port)
        part = port.slice(tensor, firing.step, spec)
        nbytes = part.tensor.numel() * part.tensor.element_size()
        full = spec.keep == "full" and (spec.cap is None or nbytes <= spec.cap)
        cap = spec.cap if spec.keep == "full" and not full else None
        self._record(port, firing, part.tensor, port.layout(part, cap, self._account.report_dims, placement), full)

    def _record(self, port: SitePort, firing: Firing, tensor: torch.Tensor, layout: RecordLayout, full: bool) -> None:
        if tensor.is_cuda and layout.count:
            if full and (fetch := fetch_here()) is not None and fetch.is_row(tensor):
                full = False
                self._account.report(port.site, f"kept as statistics: {ONLY_STATISTICS}", firing.step)
            self._await(port, firing, tensor, layout, "full" if full else "stats")
            return
        dedup = self.dedup
        taken = (
            snapshot.snapshot(tensor, layout, dedup, self._account.sink)
            if full
            else snapshot.measure(tensor, layout, dedup)
        )
        if (
            port.decision.triggers is not None
            and self._rules.run_triggers(port, firing, tensor, layout, taken)
            and not full
        ):
            taken = snapshot.snapshot(tensor, layout, dedup, self._account.sink)
        self._send(port, firing, layout, taken)

    def _await(self, port: SitePort, firing: Firing, tensor: torch.Tensor, layout: RecordLayout, keep: str) -> None:
        """A tensor on a device: its statistics and bytes come later, and are filled in by the drain."""
        sink, dedup = self._account.sink, self.dedup
        if keep == "stats" and port.decision.triggers is None and self._await_row(port, firing, tensor, layout):
            return
        slot = sink.reserve(layout.nbytes)
        if slot is None:
            if keep != "off":
                self._account.count(firing.step, dropped=1)
            return
        ask = None if port.decision.triggers is None else self._question(port, firing, tensor, layout, slot, keep)
        holds = keep == "full" or (keep == "stats" and ask is not None)
        if tensor.requires_grad:
            tensor = tensor.detach()
        try:
            copy = self.device.worker().start(tensor, layout, slot, None if holds else sink.cancel, ask)
        except BaseException:
            sink.cancel(slot)
            raise
        if keep != "off":
            payload = dedup.next_number() if holds else None
            generation = dedup.generation
            record = InflightRecord(
                port, firing, next(self._seq), layout, b"", generation, payload, slot if holds else None
            )
            record.pending_copy = copy
            self._put(record)

    def _await_row(self, port: SitePort, firing: Firing, tensor: torch.Tensor, layout: RecordLayout) -> bool:
        """Whether the device itself computes the statistics; they come later, and are filled in by the drain."""
        row = self.device.worker().summarize(tensor, layout)
        if row is None:
            return False
        record = InflightRecord(port, firing, next(self._seq), layout, b"", self.dedup.generation)
        record.pending_copy = row
        self._put(record)
        return True

    def _question(
        self, port: SitePort, firing: Firing, tensor: torch.Tensor, layout: RecordLayout, slot: PayloadSlot, keep: str
    ) -> Callable[[bytes], bool]:
        """Asks the triggers of the site when a value has come: whether its bytes are kept."""
        context = rule_context(tensor, firing)

        def ask(text: bytes) -> bool:
            fired = self._rules.run_triggers_on(port, firing, layout, text, lambda: context)
            if keep == "off" and fired:
                if not port.announced:
                    self._announce_site(port)
                if firing.step.ended:
                    self._account.mark_late(firing.step)
                dedup = self.dedup
                self._put(
                    InflightRecord(
                        port, firing, next(self._seq), layout, text, dedup.generation, dedup.next_number(), slot
                    )
                )
            return fired or keep == "full"

        return ask

    def _send(self, port: SitePort, firing: Firing, layout: RecordLayout, taken: TensorSnapshot | None) -> None:
        if taken is None:
            self._account.count(firing.step, dropped=1)
            return
        dedup = self.dedup
        text, digest, payload, slot = taken
        record = InflightRecord(port, firing, next(self._seq), layout, text, dedup.generation, payload, slot)
        if self._put(record) and slot is not None and payload is not None:
            dedup.add_payload(digest, slot.nbytes, payload)

    def _put(self, record: InflightRecord) -> bool:
        with self.native.lock:
            if self.native.num_buffered:
                self.native.flush()
            accepted = self._account.sink.put(record)
        if not accepted:
            self._account.count(record.firing.step, dropped=1)
        elif self._keeper.is_limited:
            self._keeper.charge(record)
        return accepted

    def _announce_site(self, port: SitePort) -> None:
        port.announced = True
        if port.site not in self._announced_sites:
            self._announced_sites.add(port.site)
            self._backlog.append(encode_line(port.site_line()))


def _without_padding(port: SitePort, leaf: Any, info: StepInfo) -> Any:
    """A tensor of packed tokens without the rows that pad the step; anything else as it is."""
    padded = info.grid[0] + info.num_padding
    is_packed = isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and len(leaf) == padded
    return leaf[: info.grid[0]] if is_packed and (port.dims or "").startswith("t") else leaf
