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
from tapscope.dumper.flatten import flatten, plain_value
from tapscope.dumper.rules import Moment, Selection, Taking
from tapscope.dumper.memo import Memo
from tapscope.dumper.slot import Sink
from tapscope.dumper.stamp import Stamp, record_line
from tapscope.dumper.steps import OpenStep
from tapscope.dumper.taps import Port, Tap
from tapscope.ledger import StepCounts, encode_line, event_line
from tapscope.observe import StepInfo
from tapscope.record import FORWARD

_log = logging.getLogger("tapscope")
_MAX_COMPLAINTS = 20


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
        self._pid = os.getpid()
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
        if os.getpid() != self._pid:
            return  # a forked child: its pipeline has no thread, and the rank is its parent's
        step = self.step
        if step is None:
            self.num_outside += 1
            return
        if step.skipped:
            return
        try:
            self._announce(step)
            tap.fired = True
            with self._lock:
                stamp = Stamp(step, tap.occurrence(step.serial, kind, step.micro, FORWARD), step.micro)
            for path, leaf in flatten(tap.named_inputs(*value) if kind == "in" else value):
                port = tap.ports.get((kind, path)) or tap.port(kind, path, self.selection)
                if port.may_keep:
                    self.take(port, leaf, stamp)
        except Exception as error:  # noqa: BLE001 - the model must go on
            self._fail(step, tap.path, error, seen=False)

    def take(self, port: Port, leaf: Any, stamp: Stamp) -> None:
        """Record one value at ``port``, if the rules keep it; never raises.

        Its step may have ended (a gradient): the value is then counted as late.
        """
        step, seen = stamp.step, False
        try:
            taking = port.choice.static or self._decide(port, leaf, stamp)
            if taking.keep == "off":
                return
            self._count_seen(step)
            seen = True
            if not port.announced:
                self._announce_site(port)
            self._record(port, leaf, stamp, taking)
        except Exception as error:  # noqa: BLE001 - the model must go on
            self._fail(step, port.site, error, seen=seen)

    def _record(self, port: Port, leaf: Any, stamp: Stamp, taking: Taking) -> None:
        if not isinstance(leaf, torch.Tensor):
            text = b'"value":' + encode_line(plain_value(leaf))
            self._put(Pending(record_line(next(self._seq), port, stamp, "", text), self._memo.generation), stamp.step)
            return
        tensor = leaf if capture.is_plain(leaf) else capture.local_tensor(leaf)
        part = port.part(tensor, stamp.step, taking)
        nbytes = part.tensor.numel() * part.tensor.element_size()
        full = taking.keep == "full" and (taking.cap is None or nbytes <= taking.cap)
        taken = capture.take(part.tensor, self._memo, self.sink if full else None)
        if taken is None:
            stamp.step.tally.dropped += 1
            return
        layout = port.layout(part, taking.cap if taking.keep == "full" and not full else None, self.complain)
        line = record_line(next(self._seq), port, stamp, layout.text, taken.text)
        pending = Pending(line, self._memo.generation, taken.known.payload, taken.slot)
        if taken.slot is not None:
            pending.head = (stamp.key(port).tensor_name, layout.dtype, layout.shape)
        if self._put(pending, stamp.step) and taken.slot is not None:
            self._memo.sent(taken.known)

    def _put(self, pending: Pending, step: OpenStep) -> bool:
        accepted = self.sink.put(pending)
        if accepted:
            step.tally.sent += 1
        else:
            step.tally.dropped += 1
        return accepted

    def _count_seen(self, step: OpenStep) -> None:
        with self._lock:
            tally = step.tally
            if tally is step.late and not tally.seen:
                self._late.append(step)
            tally.seen += 1

    def _fail(self, step: OpenStep, where: str, error: Exception, *, seen: bool) -> None:
        if not seen:
            self._count_seen(step)
        step.tally.failed += 1
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
