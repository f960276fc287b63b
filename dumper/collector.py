"""Collector: from a tap that fires, within a step, to records on their way. Nothing here may raise into the model."""

import itertools
import logging
import math
import os
import threading
from collections.abc import Mapping
from typing import Any

import torch

from tapscope import ledger
from tapscope.dumper import capture
from tapscope.dumper.backlog import Backlog
from tapscope.dumper.batch import Pending
from tapscope.dumper.cut import Part
from tapscope.dumper.flatten import flatten, plain_value
from tapscope.dumper.memo import Memo
from tapscope.dumper.port import NO_LAYOUT, Layout, Port
from tapscope.dumper.rules import Moment, Selection, Taking
from tapscope.dumper.slot import Sink
from tapscope.dumper.stamp import Stamp
from tapscope.dumper.steps import OpenStep
from tapscope.dumper.taps import Tap
from tapscope.ledger import StepCounts, encode_line, event_line
from tapscope.observe import StepInfo
from tapscope.record import FORWARD

_log = logging.getLogger("tapscope")
_MAX_COMPLAINTS = 20
_OUT = ("out", "")
_num_forks = 0


def _after_fork() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_after_fork)


class Collector:
    """The open step of one rank and what was counted in it."""

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog
        self.sink: Sink = backlog
        self.selection = Selection.of_nothing()
        self.step: OpenStep | None = None
        """The open step."""
        self.num_outside = 0
        """Firings outside any step, not kept."""
        self.num_dropped = 0
        self.num_failed = 0
        """Of all steps."""
        self._num_forks = _num_forks  # in a forked child there is no pipeline, and the rank is its parent's
        self._lock = threading.Lock()  # several threads may call the model at once
        self._announced_sites: set[str] = set()
        self._memo = Memo()
        self._late: list[OpenStep] = []
        self._serial = itertools.count()
        self._selected_at = 0
        self._seq = itertools.count()
        self._num_complaints = 0

    # ---- steps

    def select(self, selection: Selection) -> None:
        """A new configuration is in force, from the next step on."""
        self.selection = selection
        self._selected_at = -1

    def begin(self, info: StepInfo, epoch: int) -> None:
        """Open a step."""
        self.settle()
        serial = next(self._serial)
        if self._selected_at < 0:
            self._selected_at = serial
        skipped = info.kind is not None and self.selection.config.skip_dummy
        self.step = OpenStep(info, serial, epoch, serial - self._selected_at, skipped)
        self._memo.forget()

    def end(self, metrics: Mapping[str, float], aborted: str | None) -> None:
        """Close the open step: metrics and counts go out; ``aborted`` names the exception that ended it."""
        step, self.step = self.step, None
        if step is None:
            return
        self._announce(step)
        with self._lock:
            step.ended = True
        step.counts.aborted = aborted
        self._account(step, step.counts)
        for name, value in (step.measured() | dict(metrics)).items():
            self.metric(step.info.step, name, value)
        self._put_line(ledger.end_line(step.info.step, step.counts))
        self._backlog.flush()

    def settle(self) -> None:
        """Account for values that came after their step had ended."""
        with self._lock:
            late, self._late = self._late, []
        for step in late:
            counts, step.late = step.late, StepCounts()
            self._account(step, counts)
            self._put_line(ledger.late_line(step.info.step, counts))

    def metric(self, step: int, name: str, value: float) -> None:
        """Send a named number; one that is not finite goes as null."""
        number = float(value) if math.isfinite(value) else None
        self._put_line({"type": "metric", "step": step, "name": name, "value": number})

    def restart(self) -> None:
        """A new run begins: records are numbered from 0 and sites announced again."""
        self.settle()
        self._seq = itertools.count()
        self._announced_sites.clear()

    def _put_line(self, line: dict[str, Any]) -> None:
        self.sink.append(encode_line(line))

    def _account(self, step: OpenStep, counts: StepCounts) -> None:
        """Say at once when values begin to be lost, and in the run how many each step lost."""
        counts.seen = counts.sent + counts.dropped + counts.failed
        if counts.dropped:
            if not self.num_dropped:
                text = "tapscope drops values from step %d on: the pipeline is full or the recorder gone"
                _log.warning(text, step.info.step)
            self._put_line(event_line("dropped", step=step.info.step, num_values=counts.dropped))
        self.num_dropped += counts.dropped
        self.num_failed += counts.failed

    def _announce(self, step: OpenStep) -> None:
        if not step.announced:
            step.announced = True
            self._put_line(ledger.begin_line(step.info, step.epoch, skipped=step.skipped))

    def complain(self, where: str, reason: str) -> None:
        """Say in the run that something could not be captured; the first ones only, all are counted."""
        self._num_complaints += 1
        if self._num_complaints <= _MAX_COMPLAINTS:
            number = self.step.info.step if self.step else None
            self._put_line(event_line("failed", where=where, reason=reason, step=number))

    # ---- in the model's forward

    def fire(self, tap: Tap, kind: str, value: Any) -> None:
        """A tap fired with ``(args, kwargs)`` (kind ``in``) or an output (kind ``out``)."""
        step = self.step
        if step is None or step.skipped or self._num_forks != _num_forks:
            if step is None and self._num_forks == _num_forks:
                self.num_outside += 1
            return
        try:
            if not step.announced:
                self._announce(step)
            tap.fired = True
            with self._lock:
                stamp = Stamp(step, tap.occurrence(step.serial, kind, step.micro), step.micro)
            if type(value) is torch.Tensor:
                port = tap.ports.get(_OUT) or tap.port("out", "", self.selection)
                if port.may_keep:
                    self.take(port, value, stamp)
                return
            for path, leaf in flatten(tap.named_inputs(*value) if kind == "in" else value):
                port = tap.ports.get((kind, path)) or tap.port(kind, path, self.selection)
                if port.may_keep:
                    self.take(port, leaf, stamp)
        except Exception as error:  # noqa: BLE001 - the model must go on
            self._fail(step, tap.path, error)

    def take(self, port: Port, leaf: Any, stamp: Stamp) -> None:
        """Record one value at ``port``, if the rules keep it; never raises.

        Its step may have ended (a gradient): the value is then counted as late.
        """
        try:
            if stamp.step.ended:
                self._note_late(stamp.step)
            if port.keep is None or not isinstance(leaf, torch.Tensor):
                self._take_carefully(port, leaf, stamp)
                return
            if not port.announced:
                self._announce_site(port)
            tensor = leaf if capture.is_plain(leaf) else capture.local_tensor(leaf)
            layout = port.layouts.get((tensor.dtype, tensor.shape)) or port.layout(Part(tensor), None, self.complain)
            self._record(port, stamp, tensor, layout, port.keep == "full")
        except Exception as error:  # noqa: BLE001 - the model must go on
            self._fail(stamp.step, port.site, error)

    def _take_carefully(self, port: Port, leaf: Any, stamp: Stamp) -> None:
        """A value that is no tensor, or whose rule has conditions, or of which a part is kept."""
        taking = port.choice.static or self._decide(port, leaf, stamp)
        if taking.keep == "off":
            return
        if not port.announced:
            self._announce_site(port)
        if isinstance(leaf, torch.Tensor):
            self._record_part(port, stamp, leaf, taking)
        else:
            text = b'"value":' + encode_line(plain_value(leaf))
            self._put(Pending(port, stamp, next(self._seq), NO_LAYOUT, text, self._memo.generation))

    def _record_part(self, port: Port, stamp: Stamp, leaf: torch.Tensor, taking: Taking) -> None:
        tensor = leaf if capture.is_plain(leaf) else capture.local_tensor(leaf)
        part = port.part(tensor, stamp.step, taking)
        nbytes = part.tensor.numel() * part.tensor.element_size()
        full = taking.keep == "full" and (taking.cap is None or nbytes <= taking.cap)
        cap = taking.cap if taking.keep == "full" and not full else None
        self._record(port, stamp, part.tensor, port.layout(part, cap, self.complain), full)

    def _record(self, port: Port, stamp: Stamp, tensor: torch.Tensor, layout: Layout, full: bool) -> None:
        memo = self._memo
        taken = capture.take(tensor, layout, memo, self.sink) if full else capture.measure(tensor, layout, memo)
        if taken is None:
            self._count(stamp.step, dropped=1)
            return
        text, digest, payload, slot = taken
        pending = Pending(port, stamp, next(self._seq), layout, text, memo.generation, payload, slot)
        if self._put(pending) and slot is not None:
            memo.sent(digest, slot.nbytes, payload)

    def _put(self, pending: Pending) -> bool:
        accepted = self.sink.put(pending)
        if not accepted:
            self._count(pending.stamp.step, dropped=1)
        return accepted

    def _note_late(self, step: OpenStep) -> None:
        with self._lock:
            if step not in self._late:
                self._late.append(step)

    def _count(self, step: OpenStep, *, dropped: int = 0, failed: int = 0) -> None:
        with self._lock:
            step.tally.dropped += dropped
            step.tally.failed += failed

    def _fail(self, step: OpenStep, where: str, error: Exception) -> None:
        self._count(step, failed=1)
        self.complain(where, str(error) or type(error).__name__)

    def _announce_site(self, port: Port) -> None:
        port.announced = True
        if port.site not in self._announced_sites:
            self._announced_sites.add(port.site)
            self._backlog.append(encode_line(port.line()))

    def _decide(self, port: Port, leaf: Any, stamp: Stamp) -> Taking:
        taking = port.choice.decide(_moment(leaf, stamp))
        if port.choice.problem is not None and not port.complained:
            port.complained = True
            self.complain(port.site, port.choice.problem)
        return taking


def _moment(leaf: Any, stamp: Stamp) -> Moment:
    step = stamp.step
    is_tensor = isinstance(leaf, torch.Tensor)
    return Moment(
        step=step.info.step,
        phase=step.info.phase,
        micro=stamp.micro,
        pass_=stamp.pass_,
        occurrence=stamp.occurrence,
        age=step.age,
        dtype=str(leaf.dtype).removeprefix("torch.") if is_tensor else None,
        shape=tuple(leaf.shape) if is_tensor else (),
        nbytes=leaf.numel() * leaf.element_size() if is_tensor else 0,
        tags=stamp.tags or {},
        requests=step.requests,
    )
