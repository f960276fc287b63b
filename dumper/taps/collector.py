"""Collector: the steps of one rank, and what fires in them. Nothing here may raise into the model."""

import itertools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tapscope.core.observe import StepInfo
from tapscope.dumper.capture.capturer import Taker
from tapscope.dumper.pipeline.send_queue import Backlog
from tapscope.dumper.records.firing import Stamp
from tapscope.dumper.records.flatten import Leaves, flatten
from tapscope.dumper.records.site_port import Port
from tapscope.dumper.retention.retention_policy import Keeper
from tapscope.dumper.retention.step_counters import Account
from tapscope.dumper.selection.selection import Selection
from tapscope.dumper.steps.autograd_passes import Origin, Origins, current_node, graph_task, next_node
from tapscope.dumper.steps.deferred_line import ComingRows
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.dumper.steps.tag_context import NO_TAGS
from tapscope.dumper.steps.tag_context import current as tags
from tapscope.dumper.taps.firing_pattern import learn, pattern_of
from tapscope.dumper.taps.gradient_hooks import Gradients
from tapscope.dumper.taps.inferred_sharding import axes_of
from tapscope.dumper.taps.taps import Tap
from tapscope.run_format.record import FORWARD, RECOMPUTE

_num_forks = 0


def _after_fork() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_after_fork)


class Collector:
    """What one rank takes of its models, step by step.

    The parts: ``taker`` makes records of values, ``account`` counts and says what became of them, ``keeper`` decides
    beside the rules what reaches the disk.
    """

    def __init__(self, backlog: Backlog, *, rank: int = 0, run: Path = Path()) -> None:
        self._backlog = backlog
        self.keeper = Keeper(backlog, rank=rank, run=run)
        self.account = Account(self.keeper)
        self.taker = Taker(backlog, self.keeper, self.account)
        self.take = self.taker.take
        """Record one value at a port, see :meth:`Taker.take`."""
        self.selection = Selection.of_nothing()
        self.last: OpenStep | None = None
        """The last step of this run that has ended."""
        self.origins = Origins()
        self.gradients = Gradients(self)
        self.num_outside = 0
        """Firings outside any step, not kept."""
        self._num_forks = _num_forks  # in a forked child there is no pipeline, and the rank is its parent's
        self._serial = itertools.count()
        self._run_began = 0
        self._selected_at = 0
        self._first: Stamp | None = None  # of all that fire for the first time in the open step, without tags

    # ---- steps

    @property
    def step(self) -> OpenStep | None:
        """The open step."""
        return self.account.open

    def select(self, selection: Selection) -> None:
        """A new configuration is in force, from the next step on."""
        config = selection.config
        self.selection = selection
        self._selected_at = -1
        self.taker.arrivals.resize(config.device_bytes, soon=config.enabled)
        if self.keeper.brake.stopped is None:
            self.keeper.configure(config)
            self.account.sink = self.keeper.sink

    def begin(self, info: StepInfo, epoch: int, late_rows: ComingRows | None = None) -> None:
        """Open a step."""
        self.account.settle()
        serial = next(self._serial)
        if self._selected_at < 0:
            self._selected_at = serial
        skipped = info.kind is not None and self.selection.config.skip_dummy
        self.account.open = step = OpenStep(info, serial, epoch, serial - self._selected_at, skipped)
        step.late_rows = late_rows
        self._first = Stamp(step, 0)
        self.taker.begin(self._first)
        self.keeper.begin(step)
        self.origins.note(step, 0)

    def end(self, metrics: Mapping[str, float], aborted: str | None) -> None:
        """Close the open step: metrics and counts go out; ``aborted`` names the exception that ended it."""
        self.taker.end()
        step, self.account.open, self._first = self.account.open, None, None
        if step is None:
            return
        self.last = step
        step.counts.aborted = aborted
        self.account.end(step, self.taker.arrivals.end_step() | dict(metrics))
        self._backlog.flush_soon()
        self.keeper.end(step)

    def drop_step(self) -> None:
        """Forget the open step: nothing of it was to be kept."""
        self.taker.end()
        self.account.open = self._first = None

    def restart(self, run: Path = Path()) -> None:
        """A new run begins: records are numbered from 0 and sites announced again; the past is not part of it."""
        self.account.settle()
        self.account.num_sent = 0
        self.keeper.restart(run)
        self.gradients.forget()
        self.last = None
        self._run_began = next(self._serial)
        self.taker.restart()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the recorder has acknowledged everything that was put; whether it has."""
        self.taker.pen.pass_on()
        return self._backlog.drained(timeout_s)

    def show(self) -> None:
        """Let go what there is of the open step, which takes long: its model may hang. From any thread."""
        self.taker.pen.show()
        if not self._backlog.is_empty:
            self._backlog.flush()

    def close(self) -> None:
        """No value comes any more: wait for those that are on their way from a device."""
        self.taker.settle(last=True)
        self.taker.arrivals.close()

    # ---- in the model's forward

    def fire(self, tap: Tap, kind: str, value: Any) -> None:
        """A tap fired with ``(args, kwargs)`` (kind ``in``) or an output (kind ``out``)."""
        step = self.account.open
        if step is None or step.skipped or graph_task() != -1 or self._num_forks != _num_forks:
            if self._num_forks == _num_forks:
                self._fire_apart(tap, kind, value)
            return
        try:
            if not step.announced:
                self.account.announce(step)
            tap.fired = True
            micro = step.micro_here
            with self.account.lock:
                occurrence = tap.occurrence(step.serial, kind, micro)
            first = self._first
            is_first = not (occurrence or micro) and tags() is NO_TAGS and first is not None and first.step is step
            stamp = first if is_first and first else Stamp(step, occurrence, micro, FORWARD, tags())
            if tap.has_grads:
                step.nodes.setdefault((tap, kind, micro), []).append(next_node())
            self._give(tap, kind, value, stamp)
        except Exception as error:  # noqa: BLE001 - the model must go on
            self.account.fail(step, tap.path, error)

    def _give(self, tap: Tap, kind: str, value: Any, stamp: Stamp, forward: Stamp | None = None) -> None:
        """Every leaf of a value to the taker; of a recomputation, gradients belong to the ``forward`` it repeats."""
        ports, in_full = tap.ports, stamp.step.in_full
        met = []
        for path, leaf in _leaves(tap, kind, value):
            port = ports.get((kind, path)) or tap.port(kind, path, self.selection)
            met.append(port)
            if tap.sharding is not None and isinstance(leaf, torch.Tensor):
                _note_placement(tap, kind, port, leaf, stamp.step)
            if port.may_keep or in_full:
                self.take(port, leaf, stamp)
            if port.grad is not None and isinstance(leaf, torch.Tensor):
                self.gradients.watch(port.grad, leaf, forward or stamp, claim=forward is None)
        is_plain = stamp is self.taker.pen.stamp and not tap.has_grads and type(value) is not Leaves
        if is_plain and (fast := tap.fast.get(kind)) is not None:
            learn(fast, pattern_of(kind, value, iter(met)))

    def _fire_apart(self, tap: Tap, kind: str, value: Any) -> None:
        """A firing outside a step, or in one that is skipped, or while the autograd engine runs: a recomputation."""
        open_step = self.account.open
        if graph_task() == -1:
            self.num_outside += open_step is None
            return
        origin = self.origins.find()
        if origin is None and (step := open_step or self.last) is not None:
            origin = Origin(step, step.micro_here)
        if origin is None or origin.step.serial < self._run_began:
            self.num_outside += 1
        elif not origin.step.skipped and (origin.step.announced or origin.step is open_step):
            self._fire_again(tap, kind, value, origin)

    def _fire_again(self, tap: Tap, kind: str, value: Any, origin: Origin) -> None:
        """A recomputation of ``origin``, which may have ended."""
        step, micro = origin
        try:
            self.account.announce(step)
            tap.fired = True
            with self.account.lock:
                stamp = Stamp(step, step.claim((tap, kind, micro, RECOMPUTE)), micro, RECOMPUTE, tags())
                may_repeat = tap.has_grads and torch.is_grad_enabled()
                repeated = step.repeats((tap, kind, micro), current_node()) if may_repeat else None
            forward = stamp._replace(occurrence=stamp.occurrence if repeated is None else repeated, pass_=FORWARD)
            self._give(tap, kind, value, stamp, forward)
        except Exception as error:  # noqa: BLE001 - the model must go on
            self.account.fail(step, tap.path, error)

    def put_value(self, port: Port, leaf: Any, stamp: Stamp) -> None:
        """As :meth:`take`, for a value that no tap brought: its step may not have been announced yet."""
        if port.may_keep and not stamp.step.skipped:
            self.account.announce(stamp.step)
            self.take(port, leaf, stamp)


def _note_placement(tap: Tap, kind: str, port: Port, leaf: torch.Tensor, step: OpenStep) -> None:
    """What the model's placements tell of the tensors at a port is settled when the first one comes."""
    assert tap.sharding is not None
    placed = tap.sharding.placed(tap.path, kind, leaf, step.serial)
    if port.layouts or not (placed or hasattr(leaf, "placements")):  # a DTensor says the rest itself
        return
    for each in (port, port.grad):
        if each is not None:
            each.placed = placed
            each.dims = each.dims or axes_of(leaf.shape, step.info.grid)


def _leaves(tap: Tap, kind: str, value: Any) -> Iterable[tuple[str, Any]]:
    """``(path, leaf)`` of an output or of ``(args, kwargs)``; mostly there is one tensor and nothing to look into."""
    if type(value) is Leaves:
        return value
    if kind != "in":
        return (("", value),) if type(value) is torch.Tensor else flatten(value)
    args, kwargs = value
    if not kwargs and len(args) == 1 and type(args[0]) is torch.Tensor and tap.names:
        return ((tap.names[0], args[0]),)
    inputs = tap.named_inputs(args, kwargs)
    for each in inputs.values():
        if type(each) is not torch.Tensor:
            return flatten(inputs)
    return inputs.items()
