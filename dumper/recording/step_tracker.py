"""StepTracker: opens and ends the steps of one rank, for the host, a call of the model, or an explicit value."""

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
"""Adds the token rows that the arguments of a call determine."""


class StepTracker:
    """The steps of one rank, one open at a time.

    The host opens and ends steps if it can. Otherwise a call of an attached model is a step of its own, and an explicit
    value belongs to the step that ended last. Before the first step, or after :meth:`end_iteration`, an explicit value
    opens the next step, which the next call or the host then continues.
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
        """``before`` applies pending changes before a step and returns the epoch in force; ``ending`` and ``after`` are
        called around the end of a step; ``wanted`` returns whether steps are recorded in which nothing fires."""
        self.collector = collector
        self.next_step = 0
        """Number of the next step."""
        self._before = before
        self._ending = ending
        self._after = after
        self._wanted = wanted
        self._lock = threading.RLock()
        self._last: OpenStep | None = None  # has ended; explicit values that come now belong to it
        self._late_info: LateInfo | None = None  # of the last step that the host has opened ahead
        self._is_early = False  # the open step was opened by an explicit value
        self._iteration_ended = False  # end_iteration() was called, and nothing has come since

    @property
    def number(self) -> int:
        """Number of the next step, or of the one that an explicit value has opened for it."""
        with self._lock:
            self._apply_end_iteration()
            step = self.collector.step
            return step.info.step if step is not None and self._is_early else self.next_step

    def open(self, info: StepInfo, late_info: LateInfo | None = None) -> OpenStep | None:
        """The host opens a step; ``late_info`` if it learns the tokens later.

        Raises StepError when one is open or the number decreases.
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
        """End the open step, if there is one; ``aborted`` names the exception that ended it."""
        with self._lock:
            collector = self.collector
            step = collector.step
            if step is None:
                return None
            self._last, self._is_early = step, False
            self._ending(step)
            if step.skipped and self._wanted():
                collector.counters.announce(step)  # the line says that nothing of it was captured; it needs no other
            if not step.skipped and (step.announced or self._wanted()):
                collector.end(metrics, aborted)
            else:
                step.ended = True
                collector.drop_step()
            self._after()
            return step

    def end_iteration(self) -> OpenStep | None:
        """One iteration of the host is over: what comes from now on belongs to the next step.

        An iteration in which nothing fired counts as a step too, so that all ranks stay in step. Returns the step of
        the iteration, if anything fired. Raises StepError inside a step that the host opened.
        """
        with self._lock:
            self._apply_end_iteration()
            step = self.collector.step
            if step is not None and not self._is_early:
                raise StepError(f"step {step.info.step} is still open; steps do not nest")
            self._iteration_ended = True
            return step or self._last

    def cancel_end_iteration(self) -> None:
        """The call began ``with step()``: it ended no iteration."""
        self._iteration_ended = False

    def current(self) -> OpenStep:
        """The step that an explicit value belongs to now."""
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
        """Assign firings inside to this microbatch of the open step; raises StepError without one."""
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
        """An attached model is called: returns the step that the call is part of; None when the host opened the step.

        Threads that call at once share a step, which ends with the last of them. ``part`` is the microbatch and the
        virtual pipeline stage: each is called once with rows of its own, or with those of an earlier stage.
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
        """A call of :meth:`enter_call` is over; returns the step if that ended it."""
        with self._lock:
            step.num_callers -= 1
            step.counts.aborted = step.counts.aborted or aborted
            if step.num_callers or self.collector.step is not step:
                return None
            return self.finish({}, step.counts.aborted)

    def restart(self) -> None:
        """A new run begins: count steps from 0."""
        with self._lock:
            self._last, self._iteration_ended, self.next_step = None, False, 0

    def close(self) -> None:
        """The run ends: end the step that an explicit value or an empty iteration has opened."""
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
        """Set the rows of a step that an explicit value opened; its line is written again, and the last one counts."""
        if described[0] is not step.info and described[0] != step.info:
            step.set_rows(*described)
            step.announced = False

    def _apply_end_iteration(self) -> None:
        """Apply a pending :meth:`end_iteration`: only now is it certain that it did not begin a block."""
        if not self._iteration_ended:
            return
        self._iteration_ended = False
        if self.collector.step is None and self._last is None:
            self._begin(StepInfo(step=self.next_step))
        self.finish({}, None)
        self._last = None


class StepContext:
    """The result of ``step()``: alone it ended the previous iteration; in a ``with`` block it is the block's step."""

    def __init__(self, begin: Callable[[], Any], end: Callable[[str | None], None]) -> None:
        self._begin = begin
        self._end = end

    def __enter__(self) -> Any:
        return self._begin()

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._end(None if kind is None else kind.__name__)
