"""StepAPI: the dumper methods that begin, describe and end steps."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from msgspec.structs import replace

from tapscope.core.errors import StepError
from tapscope.core.observe import RowSpan, StepInfo
from tapscope.dumper.recording.recording import Recording
from tapscope.dumper.recording.step_tracker import StepContext
from tapscope.dumper.steps.deferred_line import LateInfo
from tapscope.dumper.steps.step_validation import metric_value, validated_step


class StepAPI:
    """Steps of the host: ``with`` blocks, iterations, or the :class:`~tapscope.core.observe.StepObserver` protocol."""

    _recording: Recording | None
    _latest: Recording | None

    def step(
        self,
        *,
        phase: str = "forward",
        grid: Sequence[int] = (),
        rows: Sequence[RowSpan] = (),
        token_ids: Sequence[int] = (),
        kind: str | None = None,
    ) -> AbstractContextManager[StepInfo]:
        """Run one step (``with dumper.step(): ...``), or end an iteration (plain call ``dumper.step()``).

        All firings inside the block belong to the step. ``kind`` is ``warmup`` or ``dummy`` for a step whose values
        are meaningless (see ``skip_dummy``). ``grid`` is the shape of the token axes; ``token_ids`` has one id per
        token row of ``rows`` (sequence, tensor or array). Raises StepError for invalid arguments and for nested steps.
        With ``strict`` backpressure, raises RecorderError if any record was lost.
        """
        info = validated_step(0, phase=phase, grid=grid, rows=rows, token_ids=token_ids, kind=kind)
        recording = self._require("step()")

        def begin() -> StepInfo:
            recording.steps.cancel_end_iteration()
            numbered = replace(info, step=recording.steps.number)
            self.before_step(numbered)
            return numbered

        if (step := recording.steps.end_iteration()) is not None:
            recording.check_strict(step)
        return StepContext(begin, self._end)

    @contextmanager
    def step_of(self, info: StepInfo) -> Iterator[None]:
        """Context manager: run one step that ``info`` describes completely; ``info.step`` must not decrease."""
        self.before_step(info)
        with StepContext(lambda: None, self._end):
            yield

    @property
    def next_step(self) -> int:
        """Number of the next step; 0 if the dumper was never open."""
        return self._latest.steps.number if self._latest is not None else 0

    @property
    def current_step(self) -> StepInfo | None:
        """The open step; None between steps."""
        step = self._recording.collector.step if self._recording is not None else None
        return None if step is None else step.info

    def before_step(self, info: StepInfo) -> None:
        """Apply a pending configuration change, then open the step ``info``."""
        if self._recording is not None:
            self._recording.steps.open(info)

    def before_step_ahead(self, info: StepInfo) -> Callable[[StepInfo], None]:
        """Open the step ``info`` before its rows and token ids are known.

        Returns a callback; the host calls it with the complete :class:`~tapscope.core.observe.StepInfo` later.
        """
        late = LateInfo(info)
        if self._recording is not None:
            self._recording.steps.open(info, late)
        return late.complete

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """End the current step. With ``strict`` backpressure, raises RecorderError if any record was lost."""
        recording = self._recording
        if recording is not None and (step := recording.steps.finish(metrics, None)) is not None:
            recording.check_strict(step)

    def accept_drafts(self, accepted: Mapping[str, int], branches: Mapping[str, Sequence[int]] | None = None) -> None:
        """Record the number of draft rows of each request that the current step accepted.

        ``branches`` maps each request with a draft tree to the indices (from 0) of its accepted draft rows.
        """
        step = self._recording.collector.step if self._recording is not None else None
        if step is not None:
            step.counts.accepted = dict(accepted)
            step.counts.accepted_branches = {name: tuple(drafts) for name, drafts in (branches or {}).items()}

    def _end(self, aborted: str | None) -> None:
        if aborted is None:
            self.after_step({})
        elif self._recording is not None:
            self._recording.steps.finish({}, aborted)

    def micro(self, number: int) -> AbstractContextManager[None]:
        """Context manager: assign all firings inside to microbatch ``number`` (from 0) of the open step.

        Gradients belong to the microbatch of their forward. Raises StepError for an invalid number, or outside a step.
        """
        if type(number) is not int or number < 0:
            raise StepError(f"micro({number!r}): must be an integer ≥ 0")
        recording = self._recording
        return recording.steps.micro(number) if recording is not None else contextlib.nullcontext()

    def paused(self) -> AbstractContextManager[None]:
        """Context manager: suspend recording inside; the open step continues afterwards.

        For a host that runs another model within the step, such as a draft model that shares modules with this one.
        """
        return self._recording.collector.paused() if self._recording is not None else contextlib.nullcontext()

    def metric(self, name: str, value: float) -> None:
        """Record the metric ``name`` for the current step; raises StepError outside a step or for a non-number."""
        value = metric_value(name, value)
        step = self._recording.collector.step if self._recording is not None else None
        if self._recording is None or step is None:
            raise StepError(f"metric {name!r} is outside a step; call it inside `with dumper.step():`")
        self._recording.collector.counters.metric(step.info.step, name, value)

    def _require(self, what: str) -> Recording:
        if self._recording is None:
            raise StepError(f"{what}: this Dumper is not open; use it as a context manager, or call open() first")
        return self._recording
