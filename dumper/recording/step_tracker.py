"""StepTracker: open and end the steps of one rank, driven by the host, by model calls, or by explicit dumps."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tapscope.core.errors import StepError
from tapscope.core.observe import StepInfo
from tapscope.dumper.steps.deferred_line import LateInfo, PendingRows
from tapscope.dumper.steps.open_step import OpenStep, StepWithRows
from tapscope.dumper.taps.collector import Collector

Describe = Callable[[StepInfo], StepWithRows]
"""Callback that adds the token rows, derived from the arguments of a model call, to a step."""


class StepTracker:
    """State machine of the steps of one rank; at most one step is open at a time.

    If the host reports steps, it opens and ends them. Otherwise each call of an attached model is a step, and an
    explicit dump belongs to the step that ended last. Before the first step, and after :meth:`end_iteration`, an
    explicit dump opens the next step early; the next model call or the host then continues that step.
    """

    def __init__(
        self,
        collector: Collector,
        *,
        before: Callable[[StepInfo], int],
        ending: Callable[[OpenStep], None],
        after: Callable[[], None],
        wanted: Callable[[], bool],
    ) -> None:
        """Create the tracker with its callbacks.

        ``before`` applies pending changes before a step and returns the active epoch. ``ending`` and ``after`` are
        called before and after a step ends. ``wanted`` returns whether to record steps in which nothing fired.
        """
        self.collector = collector
        self.next_step = 0
        """Number of the next step."""
        self._before = before
        self._ending = ending
        self._after = after
        self._wanted = wanted
        self._lock = threading.RLock()
        self._last: OpenStep | None = None  # the last step that ended; explicit dumps after it belong to it
        self._late_info: LateInfo | None = None  # late token info of the newest step that has any
        self._is_early = False  # the open step was opened by an explicit dump
        self._iteration_ended = False  # end_iteration() was called and has not been applied yet

    @property
    def number(self) -> int:
        """Number of the next step, or of the step that an explicit dump has opened early."""
        with self._lock:
            self._apply_end_iteration()
            step = self.collector.step
            return step.info.step if step is not None and self._is_early else self.next_step

    def open(self, info: StepInfo, late_info: LateInfo | None = None) -> OpenStep | None:
        """Open a step for the host; ``late_info`` supplies the tokens if the host learns them later.

        Raises StepError if the host has already opened a step, or if the step number decreases.
        """
        with self._lock:
            self._late_info = late_info or self._late_info
            self._apply_end_iteration()
            step = self.collector.step
            if step is not None and not self._is_early:
                raise StepError(f"step {step.info.step} is still open; steps do not nest")
            if step is not None and info.step == step.info.step:
                self._is_early = False
                self._describe(step, (info, late_info))
                return step
            self.finish({}, None)
            return self._begin(info, late_info)

    def finish(self, metrics: Mapping[str, float], aborted: str | None) -> OpenStep | None:
        """End the open step, if any, and return it; ``aborted`` names the exception that ended it."""
        with self._lock:
            collector = self.collector
            step = collector.step
            if step is None:
                return None
            self._last, self._is_early = step, False
            self._ending(step)
            if step.skipped and self._wanted():
                collector.counters.announce(step)  # this line marks the step as skipped; no end line is needed
            if not step.skipped and (step.announced or self._wanted()):
                collector.end(metrics, aborted)
            else:
                step.ended = True
                collector.drop_step()
            self._after()
            return step

    def end_iteration(self) -> OpenStep | None:
        """End an iteration of the host's loop: later firings belong to the next step.

        An iteration without firings counts as a step too, so that step numbers agree on all ranks. Returns the step of
        the iteration, or None if nothing fired. Raises StepError inside a step that the host opened.
        """
        with self._lock:
            self._apply_end_iteration()
            step = self.collector.step
            if step is not None and not self._is_early:
                raise StepError(f"step {step.info.step} is still open; steps do not nest")
            self._iteration_ended = True
            return step or self._last

    def cancel_end_iteration(self) -> None:
        """Cancel a pending :meth:`end_iteration`, because the call of ``step()`` was the start of a ``with`` block."""
        self._iteration_ended = False

    def current(self) -> OpenStep:
        """Return the step that an explicit dump belongs to now, opening one early if necessary."""
        step = self.collector.step or self._last
        if step is not None and not self._iteration_ended:
            return step
        with self._lock:
            self._apply_end_iteration()
            step = self.collector.step or self._last
            if step is None:
                step = self._begin(StepInfo(step=self.next_step))
                self._is_early = True
            return step

    @contextmanager
    def micro(self, number: int) -> Iterator[None]:
        """Context manager: assign firings to microbatch ``number`` of the open step; raises StepError without one."""
        self._apply_end_iteration()
        step = self.collector.step
        if step is None:
            raise StepError(f"microbatch {number} is outside a step; use it inside `with dumper.step():`")
        before, was_given = step.micro, step.micro_is_given
        step.micro, step.micro_is_given = number, True
        origins = self.collector.origins
        origins.note(step, number)
        try:
            yield
        finally:
            step.micro, step.micro_is_given = before, was_given
            origins.note(step, before)

    def enter_call(self, describe: Describe, part: tuple[int, str] = (0, "")) -> OpenStep | None:
        """Handle the start of a call of an attached model; return its step, or None if the host opened the step.

        Concurrent calls of several threads share a step, which ends with the last call. ``part`` is (microbatch,
        virtual pipeline stage): each part is called once, with its own rows or those of an earlier stage.
        """
        with self._lock:
            self._apply_end_iteration()
            step = self.collector.step
            if step is None or self._is_early:
                step = self._step_of_call(step, describe)
                step.num_callers, step.by_host = 1, False
                return step
            if step.num_callers:
                step.num_callers += 1
                self.collector.origins.note(step, step.micro)
                return step
        if step.can_set_rows():
            step.set_rows(*describe(step.info))
        elif step.rows_of_first_call and part in step.called:
            text = f"the model was called again in step {step.info.step}, whose rows are those of the first call"
            self.collector.counters.report("step", text)
        step.called.add(part)
        return None

    def leave_call(self, step: OpenStep, aborted: str | None) -> OpenStep | None:
        """Handle the end of a call started with :meth:`enter_call`; return the step if the call ended it."""
        with self._lock:
            step.num_callers -= 1
            step.counts.aborted = step.counts.aborted or aborted
            if step.num_callers or self.collector.step is not step:
                return None
            return self.finish({}, step.counts.aborted)

    def restart(self) -> None:
        """Count steps from 0 again, for a new run."""
        with self._lock:
            self._last, self._iteration_ended, self.next_step = None, False, 0

    def close(self) -> None:
        """End a step opened by an explicit dump or an empty iteration; called when the run ends."""
        with self._lock:
            if self._late_info is not None:
                self._late_info.give_up()
            self._apply_end_iteration()
            if self._is_early:
                self.finish({}, None)

    def _begin(self, info: StepInfo, late_rows: PendingRows | None = None) -> OpenStep:
        if info.step < self.next_step:
            raise StepError(f"step {info.step} comes after step {self.next_step - 1}; steps never go back in a run")
        epoch = self._before(info)
        self.next_step = info.step + 1
        self._last = None
        self.collector.begin(info, epoch, late_rows)
        step = self.collector.step
        assert step is not None
        return step

    def _step_of_call(self, early: OpenStep | None, describe: Describe) -> OpenStep:
        if early is None:
            return self._begin(*describe(StepInfo(step=self.next_step)))
        self._is_early = False
        self._describe(early, describe(early.info))
        return early

    def _describe(self, step: OpenStep, described: StepWithRows) -> None:
        """Set the rows of a step opened early; its begin line is written again, and readers use the last one."""
        if described[0] is not step.info and described[0] != step.info:
            step.set_rows(*described)
            step.announced = False

    def _apply_end_iteration(self) -> None:
        """Apply a pending :meth:`end_iteration`, as ``step()`` evidently did not start a ``with`` block."""
        if not self._iteration_ended:
            return
        self._iteration_ended = False
        if self.collector.step is None and self._last is None:
            self._begin(StepInfo(step=self.next_step))
        self.finish({}, None)
        self._last = None


class StepContext:
    """Result of ``step()``: a plain call ends the previous iteration; a ``with`` block is a step of its own."""

    def __init__(self, begin: Callable[[], Any], end: Callable[[str | None], None]) -> None:
        self._begin = begin
        self._end = end

    def __enter__(self) -> Any:
        return self._begin()

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._end(None if kind is None else kind.__name__)
