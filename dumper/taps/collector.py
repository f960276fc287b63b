"""Collector: the steps of one rank and their firings. No method called from the model may raise."""

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tapscope.core.observe import StepInfo
from tapscope.dumper.capture.capturer import Capturer
from tapscope.dumper.device.graph_fetch import Fetch
from tapscope.dumper.job import pipeline_chunks
from tapscope.dumper.pipeline.send_queue import SendQueue
from tapscope.dumper.records.firing import Firing
from tapscope.dumper.records.flatten import Leaves, flatten
from tapscope.dumper.records.replay_plan import ReplayPlan
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.retention.retention_policy import RetentionPolicy
from tapscope.dumper.retention.step_counters import StepCounters
from tapscope.dumper.selection.selection import Selection
from tapscope.dumper.steps.autograd_passes import ForwardOrigin, ForwardOrigins, current_node, graph_task, next_node
from tapscope.dumper.steps.deferred_line import PendingRows
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.dumper.steps.tag_context import NO_TAGS
from tapscope.dumper.steps.tag_context import current as tags
from tapscope.dumper.taps.firing_pattern import learn, pattern_of
from tapscope.dumper.taps.gradient_hooks import GradientHooks
from tapscope.dumper.taps.inferred_sharding import axes_of
from tapscope.dumper.taps.taps import Tap
from tapscope.run_format.ledger import StepCounts
from tapscope.run_format.record import FORWARD, RECOMPUTE

_num_forks = 0


def _after_fork() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_after_fork)


class Collector:
    """Collects the firings of one rank's models, step by step.

    ``capturer`` turns values into records, ``counters`` counts and reports them, and ``retention`` decides which of
    the records selected by the rules reach the disk.
    """

    def __init__(self, queue: SendQueue, *, rank: int) -> None:
        self._queue = queue
        self.retention = RetentionPolicy(queue, rank=rank)
        self.counters = StepCounters(self.retention)
        self.capturer = Capturer(queue, self.retention, self.counters)
        self.capture = self.capturer.capture
        """Alias of :meth:`Capturer.capture`, which records one value at a port."""
        self.selection = Selection.empty()
        self.last: OpenStep | None = None
        """The most recently ended step of this run."""
        self.origins = ForwardOrigins()
        self.gradients = GradientHooks(self.capturer, self.counters)
        self.num_outside = 0
        """Number of firings outside any step; their values are not recorded."""
        self._num_forks = _num_forks  # differs in a forked child, which has no pipeline and its parent's rank
        self._serial = itertools.count()
        self._run_began = 0
        self._selected_at = 0
        self._first: Firing | None = None  # shared by all untagged sites that fire first time in the open step

    # ---- steps

    @property
    def step(self) -> OpenStep | None:
        """The open step, if any."""
        return self.counters.open_step

    def select(self, selection: Selection) -> None:
        """Switch to the configuration of ``selection``, effective from the next step."""
        config = selection.config
        self.selection = selection
        self._selected_at = -1
        self.capturer.device.resize(config.device_staging_bytes, soon=config.enabled)
        if self.retention.capture_stop.stopped is None:
            self.retention.configure(config)
            self.counters.sink = self.retention.sink

    def begin(self, info: StepInfo, epoch: int, late_rows: PendingRows | None = None) -> None:
        """Open the step ``info`` under configuration ``epoch``; ``late_rows`` are token rows that arrive later."""
        self.counters.flush_late()
        serial = next(self._serial)
        if self._selected_at < 0:
            self._selected_at = serial
        skipped = info.kind is not None and self.selection.config.skip_dummy
        self.counters.open_step = step = OpenStep(info, serial, epoch, serial - self._selected_at, skipped)
        step.late_rows, step.micro = late_rows, info.micro
        self._first = Firing(step, 0)
        self.capturer.begin(self._first)
        self.retention.begin(step)
        self.origins.note(step, 0)

    def end(self, metrics: Mapping[str, float], aborted: str | None) -> None:
        """End the open step and send its metrics and counts; ``aborted`` names the exception that ended the step."""
        self.capturer.end()
        self.gradients.end_step()
        step, self.counters.open_step, self._first = self.counters.open_step, None, None
        if step is None:
            return
        self.last = step
        step.counts.aborted = aborted
        self.counters.end(step, self.capturer.device.end_step() | dict(metrics))
        self._queue.flush_soon()
        self.retention.end(step)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager: ignore all firings inside, without ending the open step."""
        step = self.step
        if step is None or step.skipped:
            yield
            return
        self.capturer.native.end()
        step.skipped = True
        try:
            yield
        finally:
            step.skipped = False

    def drop_step(self) -> None:
        """Discard the open step without sending its counts, because nothing of it is recorded."""
        self.capturer.end()
        self.counters.open_step = self._first = None

    def restart(self, run: Path = Path()) -> None:
        """Start a new run: number records from 0, announce sites again, and forget all earlier steps."""
        self.counters.flush_late()
        self.counters.num_sent = 0
        self.retention.restart(run)
        self.gradients.forget()
        self.last = None
        self._run_began = next(self._serial)
        self.capturer.restart()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the recorder has acknowledged everything queued; returns False after ``timeout_s`` seconds."""
        self.capturer.native.flush()
        return self._queue.drained(timeout_s)

    def flush_partial(self) -> None:
        """Send the records of the open step so far, for a step that takes long or hangs. Callable from any thread."""
        self.capturer.native.try_flush()
        if not self._queue.is_empty:
            self._queue.flush()

    def close(self) -> None:
        """Wait for pending device-to-host copies and shut the device side down; no value may follow."""
        self.capturer.settle(last=True)
        self.capturer.device.close()

    # ---- in the model's forward

    def fire(self, tap: Tap, kind: str, value: Any) -> None:
        """Record a firing of ``tap``; never raises.

        ``value`` is ``(args, kwargs)`` for the kind ``in``, a mapping NAME -> value for ``tap``, else an output.
        Firings outside a step, and those caused by the autograd engine, go to :meth:`_fire_outside`.
        """
        step = self.counters.open_step
        if step is None or step.skipped or graph_task() != -1 or self._num_forks != _num_forks:
            if self._num_forks == _num_forks:
                self._fire_outside(tap, kind, value)
            return
        micro = step.current_micro
        if micro == pipeline_chunks.SHAPE_INFERENCE:
            return
        try:
            if not step.announced:
                self.counters.announce(step)
            tap.fired = True
            with self.counters.lock:
                occurrence = tap.occurrence(step.serial, kind, micro)
            first = self._first
            is_first = not (occurrence or micro) and tags() is NO_TAGS and first is not None and first.step is step
            firing = first if is_first and first else Firing(step, occurrence, micro, FORWARD, tags())
            if tap.has_grads:
                step.nodes.setdefault((tap, kind, micro), []).append(next_node())
            self._capture_leaves(tap, kind, value, firing)
        except Exception as error:  # noqa: BLE001 - the model must go on
            self.counters.fail(step, tap.path, error)

    def shared_firing(self) -> Firing | None:
        """Return the firing shared by all sites that fire for the first time in the open step, for CUDA graph replays.

        Returns None where the shared firing does not apply: the step is skipped, kept in full, halted by a budget or
        held in memory, a later microbatch runs, or tags are set.
        """
        step, first = self.counters.open_step, self._first
        if step is None or first is None or first.step is not step or self._num_forks != _num_forks:
            return None
        is_unusual = step.skipped or step.in_full or step.halted or step.ended or step.micro or step.calls
        is_plain = tags() is NO_TAGS and graph_task() == -1 and self.counters.sink is self._queue
        return first if is_plain and not is_unusual and self.capturer.is_plain else None

    @property
    def outcome(self) -> tuple[int, int]:
        """(recorded, not recorded) values of the open step so far."""
        counts = self.counters.open_step.counts if self.counters.open_step is not None else StepCounts()
        return counts.sent + self.capturer.native.num_buffered, counts.dropped + counts.failed + counts.left_out

    def put_replay(self, plan: ReplayPlan, firing: Firing, fetch: Fetch) -> None:
        """Record one replay of a CUDA graph, whose captured memory ``fetch`` copies to the host; never raises."""
        step = firing.step
        try:
            if not step.announced:
                self.counters.announce(step)
            if not self.capturer.put_replay(plan, firing, fetch):
                self.counters.count(step, dropped=len(plan.sites))
        except Exception as error:  # noqa: BLE001 - the model must go on
            self.counters.fail(step, "a replay of a CUDA graph", error, number=len(plan.sites))

    def _capture_leaves(self, tap: Tap, kind: str, value: Any, firing: Firing, forward: Firing | None = None) -> None:
        """Capture every leaf of ``value``. In a recomputation, gradients belong to the repeated firing ``forward``."""
        ports, in_full = tap.ports, firing.step.in_full
        if kind == "out" and tap.has_grads:
            self.gradients.returned(tap)
        seen_ports, leaves = [], leaves_of(tap, kind, value)
        if kind == "in" and not tap.has_inputs and type(value) is not Leaves:  # Leaves: a selection by compiled code
            tap.note_inputs(leaves)
        for path, leaf in leaves:
            port = ports.get((kind, path)) or tap.port(kind, path, self.selection)
            seen_ports.append(port)
            if tap.sharding is not None and isinstance(leaf, torch.Tensor):
                _note_placement(tap, kind, port, leaf, firing.step)
            if port.may_keep or in_full:
                self.capture(port, leaf, firing)
            if port.grad is not None and isinstance(leaf, torch.Tensor):
                self.gradients.watch(port.grad, leaf, forward or firing, claim=forward is None, is_input=kind == "in")
        is_plain = firing is self.capturer.native.firing and not tap.has_grads and type(value) is not Leaves
        if is_plain and (fast := tap.fast.get(kind)) is not None and all(map(self.capturer.native.takes, seen_ports)):
            learn(fast, pattern_of(kind, value, iter(seen_ports)))

    def _fire_outside(self, tap: Tap, kind: str, value: Any) -> None:
        """Handle a firing outside a step, in a skipped step, or inside the autograd engine (a recomputation)."""
        open_step = self.counters.open_step
        if graph_task() == -1:
            self.num_outside += open_step is None and pipeline_chunks.current() is None
            return
        origin = self.origins.find()
        if origin is None and (step := open_step or self.last) is not None:
            origin = ForwardOrigin(step, step.current_micro)
        if origin is None or origin.step.serial < self._run_began:
            self.num_outside += 1
        elif not origin.step.skipped and (origin.step.announced or origin.step is open_step):
            self._fire_recompute(tap, kind, value, origin)

    def _fire_recompute(self, tap: Tap, kind: str, value: Any, origin: ForwardOrigin) -> None:
        """Record a recomputation in the step and microbatch of its forward, which may have ended."""
        step, micro = origin
        try:
            self.counters.announce(step)
            tap.fired = True
            with self.counters.lock:
                firing = Firing(step, step.claim_occurrence((tap, kind, micro, RECOMPUTE)), micro, RECOMPUTE, tags())
                may_repeat = tap.has_grads and torch.is_grad_enabled()
                repeated = step.repeated_firing((tap, kind, micro), current_node()) if may_repeat else None
            forward = firing._replace(occurrence=firing.occurrence if repeated is None else repeated, pass_=FORWARD)
            self._capture_leaves(tap, kind, value, firing, forward)
        except Exception as error:  # noqa: BLE001 - the model must go on
            self.counters.fail(step, tap.path, error)

    def capture_value(self, port: SitePort, leaf: Any, firing: Firing) -> None:
        """Capture a value that does not come from a tap; unlike :attr:`capture`, first announces its step."""
        if port.may_keep and not firing.step.skipped:
            self.counters.announce(firing.step)
            self.capture(port, leaf, firing)


def _note_placement(tap: Tap, kind: str, port: SitePort, leaf: torch.Tensor, step: OpenStep) -> None:
    """Set the placement and axis names of a port from the inferred sharding, before its first tensor is recorded."""
    assert tap.sharding is not None
    placement = tap.sharding.placed(tap.path, kind, leaf, step.serial)
    if port.layouts or not (placement or hasattr(leaf, "placements")):  # a DTensor carries its own placements
        return
    for each in (port, port.grad):
        if each is not None:
            each.placement = placement
            each.dims = each.dims or axes_of(leaf.shape, step.info.grid)


def leaves_of(tap: Tap, kind: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Return the ``(path, leaf)`` pairs of an output or of ``(args, kwargs)``, with shortcuts for plain tensors."""
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
