"""DraftCosts: decide whether drafting saves more time than it takes, based on the engine's own step times.

The cost of a draft token is the time that it adds to a step, including drafting, relative to the time of one token in a
step without drafts. With n requests, a step with d drafts takes as long as n + cost * d tokens and yields n tokens plus
the accepted drafts. Drafting therefore pays while the acceptance rate is well above the cost. The cost depends on the
number of requests, the model, the draft model and the machine, so it is measured.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import StepPlan

_NUM_KEPT_STEPS = 8
"""Number of recent steps kept per kind. A fast one represents them, because unrelated delays slow others."""
_MIN_STEPS = 3
"""Minimum number of steps of each kind, with and without drafts, from which a cost is computed."""
_REMEASURE_AFTER_STEPS = 512
"""Steps of the other kind after which measurements of a kind are stale and are repeated."""
_MIN_STEPS_OF_SIZE = 16
"""Minimum number of steps at a batch size before its own cost is measured, if the cost at a similar size is known."""
_MAX_SIZE_RATIO = 4
"""Maximum ratio between two batch sizes that count as similar."""
_LEAST_GAIN = 1.1
"""Minimum ratio of acceptance rate to cost.

Near 1, switching drafts on and off is not worthwhile, and requests below the average fall behind.
"""
_FIRST_TRIAL = 128
"""Steps without drafts before a trial with drafts, in case acceptance has changed; doubles after each trial."""


@dataclass(slots=True)
class _Samples:
    """Measurements of the most recent steps of one kind, with or without drafts."""

    values: "deque[Any]" = field(default_factory=lambda: deque(maxlen=_NUM_KEPT_STEPS))
    age: int = 0
    """Number of steps of the other kind since the last sample."""

    @property
    def are_enough(self) -> bool:
        return len(self.values) >= _MIN_STEPS

    def add(self, value: Any) -> None:
        self.values.append(value)
        self.age = 0


class _StepTimes:
    """Step times at one batch size, rounded by :func:`_rounded`."""

    def __init__(self) -> None:
        self._plain, self._drafted = _Samples(), _Samples()
        """``_plain``: steps without drafts, as seconds per request. ``_drafted``: steps with drafts, as (seconds, draft
        tokens) per request.
        """
        self._num_steps = 0
        self.cost: float | None = None
        """Cost of a draft token; None if not yet known."""

    @property
    def is_common(self) -> bool:
        """Whether this batch size occurred often enough to be worth measuring."""
        return self._num_steps >= _MIN_STEPS_OF_SIZE

    def to_measure(self) -> bool | None:
        """Return whether the next step should have drafts to measure the cost; None if no measurement is due."""
        for samples in (self._drafted, self._plain):
            if samples.age >= _REMEASURE_AFTER_STEPS:
                samples.values.clear()  # the machine's load and the context lengths have changed since
        if not self._drafted.are_enough:
            return True
        return None if self._plain.are_enough else False

    def add(self, seconds: float, drafts: float) -> None:
        """Add a step with its duration and number of draft tokens, both per request."""
        self._num_steps += 1
        if drafts:
            self._drafted.add((seconds, drafts))
            self._plain.age += 1
        else:
            self._plain.add(seconds)
            self._drafted.age += 1
        if self._plain.are_enough and self._drafted.are_enough:
            token = _lower_tercile(self._plain.values)
            added = _lower_tercile((seconds - token) / drafts for seconds, drafts in self._drafted.values)
            self.cost = max(0.0, added / token)


class DraftCosts:
    """Draft token costs by batch size, the number of running requests, in buckets 1, 2, …, 16, 18, 20, …, 32, 36, ….

    Until the cost at a batch size is known, the cost at a similar size decides; a size is measured only once it is
    common. Drafting that does not pay is tried again periodically.
    """

    def __init__(self) -> None:
        self._times: dict[int, _StepTimes] = {}
        self._drafted: bool | None = None
        """Whether the last step had drafts; None if it computed a prompt."""
        self._num_plain, self._num_trial = 0, 0
        """``_num_plain``: steps without drafts since the last one with drafts. ``_num_trial``: remaining steps of a
        trial with drafts.
        """
        self._next_trial = _FIRST_TRIAL
        self._pays = False
        """Whether the last decision was to draft because the cost is low enough."""

    def drafting_pays(self, running: Sequence[Request], acceptance: float) -> bool:
        """Return whether the next step should have drafts, given their expected rate of ``acceptance``.

        Occasionally deviates from the measured costs, in order to measure again.
        """
        count = _rounded(len(running))
        times = self._times.setdefault(count, _StepTimes())
        cost, self._pays = self._cost(count), False
        if all(request.is_decoding for request in running):
            chosen = times.to_measure() if cost is None or times.is_common else None
            if chosen is not None:
                return chosen
            if self._num_trial or self._num_plain >= self._next_trial:
                return True
        self._pays = cost is None or acceptance > _LEAST_GAIN * cost
        return self._pays

    def record(self, plan: StepPlan, seconds: float) -> None:
        """Record that the step ``plan`` took ``seconds``, including drafting.

        Steps that compute prompts are ignored. So are the first step with drafts after steps without, in which a draft
        model catches up, and the first step without drafts after steps with drafts, which is not launched ahead.
        """
        count = len(plan.scheduled)
        if any(item.position < item.prompt_length or len(item.tokens) > item.num_drafts + 1 for item in plan.scheduled):
            self._drafted = None
            return
        num_drafts = sum(item.num_drafts for item in plan.scheduled)
        has_drafts = num_drafts > 0
        if self._drafted is has_drafts or (self._drafted is None and not has_drafts):
            self._times.setdefault(_rounded(count), _StepTimes()).add(seconds / count, num_drafts / count)
        self._drafted = has_drafts
        self._count_trials(has_drafts=has_drafts)

    def _count_trials(self, *, has_drafts: bool) -> None:
        if not has_drafts:
            self._num_plain += 1
            return
        if self._num_plain >= self._next_trial:
            self._num_trial, self._next_trial = _MIN_STEPS, min(_REMEASURE_AFTER_STEPS, 2 * self._next_trial)
        elif self._pays:
            self._next_trial = _FIRST_TRIAL
        self._num_plain, self._num_trial = 0, max(0, self._num_trial - 1)

    def _cost(self, count: int) -> float | None:
        """Return the cost at batch size ``count`` or a similar one; None if not yet known."""
        own = self._times[count].cost
        if own is not None:
            return own
        near = [
            (max(each, count) / min(each, count), times.cost)
            for each, times in self._times.items()
            if times.cost is not None
        ]
        ratio, cost = min(near, default=(math.inf, None))
        return cost if ratio <= _MAX_SIZE_RATIO else None

    def state(self) -> dict[str, float]:
        """Map each batch size with a known cost to the cost of a draft token; keys are upper bounds of the buckets."""
        return {str(count): times.cost for count, times in sorted(self._times.items()) if times.cost is not None}


def _lower_tercile(values: Iterable[float]) -> float:
    """Return the value at the lower tercile: the smallest of three, the third smallest of eight."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 3]


def _rounded(count: int) -> int:
    """Round ``count`` up to four significant bits: with 8 requests, a token takes much less time than with 5."""
    unit = 1 << max(0, count.bit_length() - 4)
    return -(-count // unit) * unit
