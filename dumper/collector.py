"""Collector: from a tap that fires, within a step, to records on their way. Nothing here may raise into the model."""

import itertools
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tapscope import ledger
from tapscope.dumper import capture
from tapscope.dumper.backlog import Backlog
from tapscope.dumper.batch import Pending
from tapscope.dumper.capture import Taken
from tapscope.dumper.captures import Captures
from tapscope.dumper.context import current as tags
from tapscope.dumper.cut import Part
from tapscope.dumper.device import Cuda
from tapscope.dumper.drain import Drain
from tapscope.dumper.flatten import flatten, plain_value
from tapscope.dumper.gradients import Gradients
from tapscope.dumper.keeper import Keeper
from tapscope.dumper.memo import Memo
from tapscope.dumper.moment import moment_of
from tapscope.dumper.passes import Origin, Origins, current_node, graph_task, next_node
from tapscope.dumper.placement import Placed
from tapscope.dumper.port import NO_LAYOUT, Layout, Port
from tapscope.dumper.rules import Moment, Selection, Taking
from tapscope.dumper.slot import Sink, Slot
from tapscope.dumper.stamp import Stamp
from tapscope.dumper.steps import OpenStep
from tapscope.dumper.taps import Tap
from tapscope.dumper.unwrap import Local, unwrap
from tapscope.ledger import StepCounts, encode_line, event_line
from tapscope.observe import StepInfo
from tapscope.record import FORWARD, RECOMPUTE

_log = logging.getLogger("tapscope")
_MAX_COMPLAINTS = 20
_OUT = ("out", "")
_FULL = Taking("full")
_num_forks = 0


def _after_fork() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_after_fork)


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class Collector:
    """The open step of one rank and what was counted in it."""

    def __init__(self, backlog: Backlog, *, rank: int = 0, run: Path = Path()) -> None:
        self._backlog = backlog
        self.sink: Sink = backlog
        self.keeper = Keeper(backlog, rank=rank, run=run)
        self.selection = Selection.of_nothing()
        self.step: OpenStep | None = None
        """The open step."""
        self.last: OpenStep | None = None
        """The last step of this run that has ended."""
        self.origins = Origins()
        self.gradients = Gradients(self)
        self.captures: list[Captures] = []
        """Who takes what is recorded now, in memory; nothing then goes to the run."""
        self.has_dropped = False
        """Whether it was said that values are dropped."""
        self.num_outside = 0
        """Firings outside any step, not kept."""
        self.num_failed = 0
        """Of all steps."""
        self._num_forks = _num_forks  # in a forked child there is no pipeline, and the rank is its parent's
        self._lock = threading.Lock()  # several threads may call the model at once
        self._announced_sites: set[str] = set()
        self._memo = Memo()
        self._late: list[OpenStep] = []
        self._serial = itertools.count()
        self._run_began = 0
        self._selected_at = 0
        self._seq = itertools.count()
        self._num_complaints = 0
        self._wrong_dims: set[str] = set()
        self._num_dropped = 0
        self._drain: Drain | None = None

    # ---- steps

    @property
    def num_dropped(self) -> int:
        """Values of all steps that were given up; of held steps, once they are released."""
        return self._num_dropped + self.keeper.num_dropped

    def select(self, selection: Selection) -> None:
        """A new configuration is in force, from the next step on."""
        self.selection = selection
        self._selected_at = -1
        if self._drain is not None:
            self._drain.resize(selection.config.device_bytes)
        elif selection.config.enabled and isinstance(self._backlog, Backlog) and _uses_cuda():
            self._draining().prepare()
        if self.keeper.stopped is None:
            self.keeper.configure(selection.config)
            self.sink = self.keeper.sink

    def begin(self, info: StepInfo, epoch: int) -> None:
        """Open a step."""
        self.settle()
        serial = next(self._serial)
        if self._selected_at < 0:
            self._selected_at = serial
        skipped = info.kind is not None and self.selection.config.skip_dummy
        self.step = OpenStep(info, serial, epoch, serial - self._selected_at, skipped)
        self._memo.forget()
        self.keeper.begin(self.step)
        self.origins.note(self.step, 0)

    def end(self, metrics: Mapping[str, float], aborted: str | None) -> None:
        """Close the open step: metrics and counts go out; ``aborted`` names the exception that ended it."""
        step, self.step = self.step, None
        if step is None:
            return
        self.last = step
        self.announce(step)
        with self._lock:
            step.ended = True
        step.counts.aborted = aborted
        self._account(step, step.counts)
        direct = {"num_direct_copies": self._drain.count_direct()} if self._drain is not None else {}
        for name, value in (step.measured() | direct | dict(metrics)).items():
            self.metric(step.info.step, name, value)
        self._put_line(ledger.end_line(step.info.step, step.counts))
        self._backlog.flush()
        self.keeper.end(step)

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

    def restart(self, run: Path = Path()) -> None:
        """A new run begins: records are numbered from 0 and sites announced again; the past is not part of it."""
        self.settle()
        self.keeper.restart(run)
        self.gradients.forget()
        self.last = None
        self._run_began = next(self._serial)
        self._seq = itertools.count()
        self._announced_sites.clear()

    def close(self) -> None:
        """No value comes any more: wait for those that are on their way from a device."""
        if self._drain is not None:
            self._drain.close()

    def _put_line(self, line: dict[str, Any]) -> None:
        self.sink.append(encode_line(line))

    def _account(self, step: OpenStep, counts: StepCounts) -> None:
        """Say at once when values begin to be lost, and in the run how many each step lost."""
        counts.seen = counts.sent + counts.dropped + counts.failed
        if counts.dropped:
            if not self.has_dropped:
                self.has_dropped = True
                _log.warning("tapscope drops values from step %d on: %s", step.info.step, self.keeper.no_room)
            self._put_line(event_line("dropped", step=step.info.step, num_values=counts.dropped))
        if not self.keeper.is_holding:
            self._num_dropped += counts.dropped
        self.num_failed += counts.failed

    def announce(self, step: OpenStep) -> None:
        """Write its line, unless that was done: something of it is about to be recorded."""
        if not step.announced:
            step.announced = True
            self._put_line(ledger.begin_line(step.info, step.epoch, skipped=step.skipped))
            if step.ended:  # nothing came while it was open
                self._put_line(ledger.end_line(step.info.step, step.counts))

    def _complain_of_dims(self, where: str, reason: str) -> None:
        """What is wrong with the dims of one site is wrong with those of many: each reason is said once."""
        if reason not in self._wrong_dims:
            self._wrong_dims.add(reason)
            self.complain(where, f"dims left out, here and where the same holds: {reason}")

    def complain(self, where: str, reason: str, step: OpenStep | None = None) -> None:
        """Say in the run that something could not be captured; the first ones only, all are counted."""
        step = step or self.step
        self._num_complaints += 1
        if self._num_complaints <= _MAX_COMPLAINTS:
            number = step.info.step if step else None
            self._put_line(event_line("failed", where=where, reason=reason, step=number))

    # ---- in the model's forward

    def fire(self, tap: Tap, kind: str, value: Any) -> None:
        """A tap fired with ``(args, kwargs)`` (kind ``in``) or an output (kind ``out``)."""
        step = self.step
        if step is None or step.skipped or graph_task() != -1 or self._num_forks != _num_forks:
            if self._num_forks == _num_forks:
                self._fire_apart(tap, kind, value)
            return
        try:
            if not step.announced:
                self.announce(step)
            tap.fired = True
            with self._lock:
                stamp = Stamp(step, tap.occurrence(step.serial, kind, step.micro), step.micro, FORWARD, tags())
            if tap.has_grads:
                step.nodes.setdefault((tap, kind, step.micro), []).append(next_node())
            if type(value) is torch.Tensor:
                port = tap.ports.get(_OUT) or tap.port("out", "", self.selection)
                if port.may_keep or step.in_full:
                    self.take(port, value, stamp)
                if port.grad is not None:
                    self.gradients.watch(port.grad, value, stamp)
                return
            for path, leaf in flatten(tap.named_inputs(*value) if kind == "in" else value):
                port = tap.ports.get((kind, path)) or tap.port(kind, path, self.selection)
                if port.may_keep or step.in_full:
                    self.take(port, leaf, stamp)
                if port.grad is not None and isinstance(leaf, torch.Tensor):
                    self.gradients.watch(port.grad, leaf, stamp)
        except Exception as error:  # noqa: BLE001 - the model must go on
            self.fail(step, tap.path, error)

    def _fire_apart(self, tap: Tap, kind: str, value: Any) -> None:
        """A firing outside a step, or in one that is skipped, or while the autograd engine runs: a recomputation."""
        open_step = self.step
        if graph_task() == -1:
            self.num_outside += open_step is None
            return
        origin = self.origins.find()
        if origin is None and (step := open_step or self.last) is not None:
            origin = Origin(step, step.micro)
        if origin is None or origin.step.serial < self._run_began:
            self.num_outside += 1
        elif not origin.step.skipped and (origin.step.announced or origin.step is open_step):
            self._fire_again(tap, kind, value, origin)

    def _fire_again(self, tap: Tap, kind: str, value: Any, origin: Origin) -> None:
        """A recomputation of ``origin``, which may have ended. Its gradients belong to the forward that it repeats."""
        step, micro = origin
        try:
            self.announce(step)
            tap.fired = True
            with self._lock:
                stamp = Stamp(step, step.claim((tap, kind, micro, RECOMPUTE)), micro, RECOMPUTE, tags())
                may_repeat = tap.has_grads and torch.is_grad_enabled()
                repeated = step.repeats((tap, kind, micro), current_node()) if may_repeat else None
            forward = stamp._replace(occurrence=stamp.occurrence if repeated is None else repeated, pass_=FORWARD)
            for path, leaf in flatten(tap.named_inputs(*value) if kind == "in" else value):
                port = tap.ports.get((kind, path)) or tap.port(kind, path, self.selection)
                if port.may_keep:
                    self.take(port, leaf, stamp)
                if port.grad is not None and isinstance(leaf, torch.Tensor):
                    self.gradients.watch(port.grad, leaf, forward, claim=False)
        except Exception as error:  # noqa: BLE001 - the model must go on
            self.fail(step, tap.path, error)

    def put_value(self, port: Port, leaf: Any, stamp: Stamp) -> None:
        """As :meth:`take`, for a value that no tap brought: its step may not have been announced yet."""
        if port.may_keep and not stamp.step.skipped:
            self.announce(stamp.step)
            self.take(port, leaf, stamp)

    def take(self, port: Port, leaf: Any, stamp: Stamp) -> None:
        """Record one value at ``port``, if the rules keep it; never raises.

        Its step may have ended (a gradient): the value is then counted as late.
        """
        try:
            if self.captures:
                self._divert(port, leaf, stamp)
                return
            if stamp.step.ended:
                self._note_late(stamp.step)
            unusual = stamp.step.in_full or stamp.step.halted or port.keep is None
            if unusual or not isinstance(leaf, torch.Tensor) or not capture.is_plain(leaf):
                self._take_carefully(port, leaf, stamp)
                return
            if not port.announced:
                self._announce_site(port)
            layout = port.layouts.get((leaf.dtype, leaf.shape)) or port.layout(Part(leaf), None, self.complain)
            self._record(port, stamp, leaf, layout, port.keep == "full")
        except Exception as error:  # noqa: BLE001 - the model must go on
            self.fail(stamp.step, port.site, error)

    def _divert(self, port: Port, leaf: Any, stamp: Stamp) -> None:
        """A value for those who capture in memory."""
        taking = port.choice.static or self._decide(port, leaf, stamp)
        if taking.keep != "off":
            for each in self.captures:
                each.add(port, leaf, stamp, taking)

    def _take_carefully(self, port: Port, leaf: Any, stamp: Stamp) -> None:
        """A value that is no ordinary tensor, or whose rule has conditions, or of which a part is kept."""
        taking = _FULL if stamp.step.in_full else port.choice.static or self._decide(port, leaf, stamp)
        if stamp.step.halted:
            self._count(stamp.step, left_out=taking.keep != "off")
        elif taking.keep != "off":
            self._take_as(port, leaf, stamp, taking)
        elif port.choice.sentinel is not None and isinstance(leaf, torch.Tensor):
            self._look(port, leaf, stamp)

    def _look(self, port: Port, leaf: torch.Tensor, stamp: Stamp) -> None:
        """The rules keep nothing here, but a trigger asks: measured, and kept in full if that makes it fire."""
        try:
            found = Local(leaf) if capture.is_plain(leaf) else unwrap(leaf)
        except Exception as error:  # noqa: BLE001 - nothing is lost that was asked for
            self.complain(port.site, f"no trigger can see it: {error}", stamp.step)
            return
        if not isinstance(found, Local):
            return
        layout = port.layout(Part(found.tensor), None, self._complain_of_dims, found.placed)
        if found.tensor.is_cuda and layout.count:
            self._await(port, stamp, found.tensor, layout, "off")
            return
        measured = capture.measure(found.tensor, layout, self._memo)
        if self._alarmed(port, stamp, found.tensor, layout, measured):
            if not port.announced:
                self._announce_site(port)
            self._send(port, stamp, layout, capture.take(found.tensor, layout, self._memo, self.sink))

    def _take_as(self, port: Port, leaf: Any, stamp: Stamp, taking: Taking) -> None:
        """A value of which this is kept: as one record, or as the parts of an unusual tensor, which fail apart."""
        if isinstance(leaf, torch.Tensor):
            found = Local(leaf) if capture.is_plain(leaf) else unwrap(leaf)
            if isinstance(found, Local):
                self._record_part(port, stamp, found.tensor, taking, found.placed)
                return
            for name, part in found:
                inner = port.part_of(name)
                try:
                    self._take_as(inner, part, stamp, Taking(taking.keep, cap=taking.cap))
                except Exception as error:  # noqa: BLE001 - the other parts must go on
                    self.fail(stamp.step, inner.site, error)
        else:
            if not port.announced:
                self._announce_site(port)
            text = b'"value":' + encode_line(plain_value(leaf))
            self._put(Pending(port, stamp, next(self._seq), NO_LAYOUT, text, self._memo.generation))

    def _record_part(
        self, port: Port, stamp: Stamp, tensor: torch.Tensor, taking: Taking, placed: Placed | None
    ) -> None:
        if not port.announced:
            self._announce_site(port)
        part = port.part(tensor, stamp.step, taking)
        nbytes = part.tensor.numel() * part.tensor.element_size()
        full = taking.keep == "full" and (taking.cap is None or nbytes <= taking.cap)
        cap = taking.cap if taking.keep == "full" and not full else None
        self._record(port, stamp, part.tensor, port.layout(part, cap, self._complain_of_dims, placed), full)

    def _record(self, port: Port, stamp: Stamp, tensor: torch.Tensor, layout: Layout, full: bool) -> None:
        if tensor.is_cuda and layout.count:
            self._await(port, stamp, tensor, layout, "full" if full else "stats")
            return
        memo = self._memo
        taken = capture.take(tensor, layout, memo, self.sink) if full else capture.measure(tensor, layout, memo)
        if port.choice.sentinel is not None and self._alarmed(port, stamp, tensor, layout, taken) and not full:
            taken = capture.take(tensor, layout, memo, self.sink)
        self._send(port, stamp, layout, taken)

    def _alarmed(self, port: Port, stamp: Stamp, tensor: torch.Tensor, layout: Layout, taken: Taken | None) -> bool:
        """Ask the triggers of the site; whether the step, and what was only measured here, is to be kept in full."""
        text = (taken or capture.measure(tensor, layout, self._memo))[0]
        return self._asked(port, stamp, layout, text, lambda: moment_of(tensor, stamp))

    def _asked(self, port: Port, stamp: Stamp, layout: Layout, text: bytes, moment: Callable[[], Moment]) -> bool:
        sentinel = port.choice.sentinel
        assert sentinel is not None
        fired = sentinel.fired(text, moment)
        if sentinel.problem is not None and not port.complained:
            port.complained = True
            self.complain(port.site, sentinel.problem, stamp.step)
        capped = '"cap":' in layout.text
        return bool(fired) and self.keeper.sound(fired, port.site, stamp.step) and not capped

    def _await(self, port: Port, stamp: Stamp, tensor: torch.Tensor, layout: Layout, keep: str) -> None:
        """A tensor on a device: its statistics and bytes come later, and are filled in by the drain."""
        sink, memo = self.sink, self._memo
        slot = sink.reserve(layout.nbytes)
        if slot is None:
            if keep != "off":
                self._count(stamp.step, dropped=1)
            return
        ask = None if port.choice.sentinel is None else self._question(port, stamp, tensor, layout, slot, keep)
        holds = keep == "full" or (keep == "stats" and ask is not None)
        try:
            copy = self._draining().start(tensor, layout, slot, None if holds else sink.cancel, ask)
        except BaseException:
            sink.cancel(slot)
            raise
        if keep != "off":
            payload = memo.number() if holds else None
            generation = memo.generation
            pending = Pending(port, stamp, next(self._seq), layout, b"", generation, payload, slot if holds else None)
            pending.arrival = copy
            self._put(pending)

    def _question(
        self, port: Port, stamp: Stamp, tensor: torch.Tensor, layout: Layout, slot: Slot, keep: str
    ) -> Callable[[bytes], bool]:
        """Asks the triggers of the site when a value has come: whether its bytes are kept."""
        moment = moment_of(tensor, stamp)

        def ask(text: bytes) -> bool:
            fired = self._asked(port, stamp, layout, text, lambda: moment)
            if keep == "off" and fired:
                if not port.announced:
                    self._announce_site(port)
                if stamp.step.ended:
                    self._note_late(stamp.step)
                memo = self._memo
                self._put(Pending(port, stamp, next(self._seq), layout, text, memo.generation, memo.number(), slot))
            return fired or keep == "full"

        return ask

    def _draining(self) -> Drain:
        drain = self._drain
        if drain is None:
            with self._lock:
                drain = self._drain
                if drain is None:
                    limit = self.selection.config.device_bytes
                    drain = self._drain = Drain(Cuda(), self._backlog, limit, self._note_lost)
        return drain

    def _note_lost(self) -> None:
        """A value did not come from its device; the pipeline says so in the run."""
        with self._lock:
            self.num_failed += 1

    def _send(self, port: Port, stamp: Stamp, layout: Layout, taken: Taken | None) -> None:
        if taken is None:
            self._count(stamp.step, dropped=1)
            return
        memo = self._memo
        text, digest, payload, slot = taken
        pending = Pending(port, stamp, next(self._seq), layout, text, memo.generation, payload, slot)
        if self._put(pending) and slot is not None and payload is not None:
            memo.sent(digest, slot.nbytes, payload)

    def _put(self, pending: Pending) -> bool:
        accepted = self.sink.put(pending)
        if not accepted:
            self._count(pending.stamp.step, dropped=1)
        elif self.keeper.is_limited:
            self.keeper.charge(pending)
        return accepted

    def _note_late(self, step: OpenStep) -> None:
        with self._lock:
            if step not in self._late:
                self._late.append(step)

    def _count(self, step: OpenStep, *, dropped: int = 0, failed: int = 0, left_out: int = 0) -> None:
        with self._lock:
            step.tally.left_out += left_out
            step.tally.dropped += dropped
            step.tally.failed += failed

    def fail(self, step: OpenStep, where: str, error: Exception) -> None:
        """A value of the step could not be captured: count it and say why."""
        if step.ended:
            self._note_late(step)
        self._count(step, failed=1)
        self.complain(where, str(error) or type(error).__name__, step)

    def _announce_site(self, port: Port) -> None:
        port.announced = True
        if port.site not in self._announced_sites:
            self._announced_sites.add(port.site)
            self._backlog.append(encode_line(port.line()))

    def _decide(self, port: Port, leaf: Any, stamp: Stamp) -> Taking:
        taking = port.choice.decide(moment_of(leaf, stamp))
        if port.choice.problem is not None and not port.complained:
            port.complained = True
            self.complain(port.site, port.choice.problem)
        return taking
