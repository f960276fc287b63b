"""DraftCosts: whether draft tokens save more time than they take, measured on the engine's own steps.

The cost of a draft token is the time that it adds to a step, drafting included, relative to the time of a token in a
step without drafts. With n requests, a step with d drafts takes as long as n + cost * d tokens and yields n plus the
accepted ones: drafts pay while the share of accepted ones is well above the cost. Costs differ with the number of
requests, the model, the draft model and the machine, so that they are measured.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import StepPlan

_NUM_KEPT_STEPS = 8
"""Steps of which a fast one is the time of a step: others waited for what has nothing to do with drafts."""
_MIN_STEPS = 3
"""Steps with and without drafts from which on a cost is known."""
_REMEASURE_AFTER_STEPS = 512
"""Steps after the last one of a kind from which on this kind is measured again."""
_MIN_STEPS_OF_SIZE = 16
"""Steps of as many requests from which on their own cost is measured, where one of about as many is known."""
_MAX_SIZE_RATIO = 4
"""Factor by which such a number of requests may differ."""
_LEAST_GAIN = 1.1
"""How much higher than the cost the acceptance must be: where they are close, starting and stopping is not worth it,
and requests below the average fall behind."""
_FIRST_TRIAL = 128
"""Steps without drafts after which some have drafts, whose acceptance may have changed; twice as many next time."""


@dataclass(slots=True)
class _Samples:
    """The last steps of one kind, with or without drafts."""

    values: "deque[Any]" = field(default_factory=lambda: deque(maxlen=_NUM_KEPT_STEPS))
    age: int = 0
    """Steps of the other kind since the last of them."""

    @property
    def are_enough(self) -> bool:
        return len(self.values) >= _MIN_STEPS

    def add(self, value: Any) -> None:
        self.values.append(value)
        self.age = 0


class _StepTimes:
    """Of steps with about the same number of requests."""

    def __init__(self) -> None:
        self._plain, self._drafted = _Samples(), _Samples()
        """Steps without drafts, as seconds per request; those with drafts, as (seconds, draft tokens) per request."""
        self._num_steps = 0
        self.cost: float | None = None
        """None: not known yet."""

    @property
    def lasts(self) -> bool:
        """Whether there were enough steps for their cost to be worth measuring."""
        return self._num_steps >= _MIN_STEPS_OF_SIZE

    def to_measure(self) -> bool | None:
        """Whether the next step should have drafts, to learn the cost; None: the cost decides."""
        for samples in (self._drafted, self._plain):
            if samples.age >= _REMEASURE_AFTER_STEPS:
                samples.values.clear()  # the machine's load and the contexts' lengths have changed since
        if not self._drafted.are_enough:
            return True
        return None if self._plain.are_enough else False

    def add(self, seconds: float, drafts: float) -> None:
        """Add a step: its duration and its number of draft tokens, both per request."""
        self._num_steps += 1
        if drafts:
            self._drafted.add((seconds, drafts))
            self._plain.age += 1
        else:
            self._plain.add(seconds)
            self._drafted.age += 1
        if self._plain.are_enough and self._drafted.are_enough:
            token = _fast(self._plain.values)
            added = _fast((seconds - token) / drafts for seconds, drafts in self._drafted.values)
            self.cost = max(0.0, added / token)


class DraftCosts:
    """Costs by the number of running requests: 1, 2, and so on up to 16, then up to 18, 20, …, 32, 36, and so on.

    Where the cost of exactly as many requests is not known yet, that of about as many decides; the exact one is
    measured only once their number lasts. Drafts that do not pay are tried again now and then.
    """

    def __init__(self) -> None:
        self._times: dict[int, _StepTimes] = {}
        self._drafted: bool | None = None
        """Whether the last step had drafts; None: it computed a prompt."""
        self._num_plain, self._num_trial = 0, 0
        """Steps without drafts since the last one with some; steps with drafts that a trial still takes."""
        self._next_trial = _FIRST_TRIAL
        self._pays = False
        """Whether the last answer was that drafts pay, by their cost."""

    def drafting_pays(self, running: Sequence[Request], acceptance: float) -> bool:
        """Whether the next step should have drafts, of which the share ``acceptance`` is likely accepted.

        Now and then the answer is not what the last measurements say, to measure again.
        """
        count = _rounded(len(running))
        times = self._times.setdefault(count, _StepTimes())
        cost, self._pays = self._cost(count), False
        if all(request.is_decoding for request in running):
            chosen = times.to_measure() if cost is None or times.lasts else None
            if chosen is not None:
                return chosen
            if self._num_trial or self._num_plain >= self._next_trial:
                return True
        self._pays = cost is None or acceptance > _LEAST_GAIN * cost
        return self._pays

    def record(self, plan: StepPlan, seconds: float) -> None:
        """The step took ``seconds``, drafting included.

        Steps that compute prompts are not counted, nor is the first step with drafts after others: a draft model first
        computes what it has missed. Nor is the first step without drafts after one with some, which is not launched
        ahead.
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
        """The cost with ``count`` requests, or with about as many; None: not known yet."""
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
        """Number of requests, at most -> the cost of a draft token, where it is known."""
        return {str(count): times.cost for count, times in sorted(self._times.items()) if times.cost is not None}


def _fast(values: Iterable[float]) -> float:
    """Below two thirds of ``values``; of three the least, of eight the third."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 3]


def _rounded(count: int) -> int:
    """Up to four binary digits: with 8 requests a token takes much less time than with 5."""
    unit = 1 << max(0, count.bit_length() - 4)
    return -(-count // unit) * unit
