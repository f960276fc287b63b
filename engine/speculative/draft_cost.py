"""DraftCosts: whether draft tokens save more time than they take, measured on the engine's own steps.

The cost of a draft token is the time that it adds to a step, drafting included, relative to the time of a token in a
step without drafts. With n requests, a step with d drafts takes as long as n + cost * d tokens and yields n plus the
accepted ones: drafts pay while the share of accepted ones is above the cost. Costs differ with the number of requests,
the model, the draft model and the machine, so that they are measured.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import StepPlan

_KEPT = 8
"""Steps whose median is the time of a step."""
_NEEDED = 3
"""Steps with and without drafts from which on a cost is known."""
_REMEASURE = 512
"""Steps after the last one of a kind from which on this kind is measured afresh."""


@dataclass(slots=True)
class _Samples:
    """The last steps of one kind, with or without drafts."""

    values: "deque[Any]" = field(default_factory=lambda: deque(maxlen=_KEPT))
    age: int = 0
    """Steps of the other kind since the last of them."""

    @property
    def are_enough(self) -> bool:
        return len(self.values) >= _NEEDED

    def add(self, value: Any) -> None:
        self.values.append(value)
        self.age = 0


class _StepTimes:
    """Of steps with about the same number of requests."""

    def __init__(self) -> None:
        self._plain, self._drafted = _Samples(), _Samples()
        """Steps without drafts, as seconds per request; those with drafts, as (seconds, draft tokens) per request."""

    @property
    def cost(self) -> float | None:
        """None: not known yet."""
        if not (self._plain.are_enough and self._drafted.are_enough):
            return None
        token: float = statistics.median(self._plain.values)
        added: float = statistics.median((seconds - token) / drafts for seconds, drafts in self._drafted.values)
        return max(0.0, added / token)

    def to_measure(self) -> bool | None:
        """Whether the next step shall have drafts, so that the cost is known; None: the cost decides."""
        for samples in (self._drafted, self._plain):
            if samples.age >= _REMEASURE:
                samples.values.clear()  # the machine's load and the contexts' lengths are others by now
        if not self._drafted.are_enough:
            return True
        return None if self._plain.are_enough else False

    def add(self, seconds: float, drafts: float) -> None:
        """Add a step: its duration and its number of draft tokens, both per request."""
        if drafts:
            self._drafted.add((seconds, drafts))
            self._plain.age += 1
        else:
            self._plain.add(seconds)
            self._drafted.age += 1


class DraftCosts:
    """Costs by the number of running requests: 1, 2, and so on up to 16, then up to 18, 20, …, 32, 36, and so on."""

    def __init__(self) -> None:
        self._times: dict[int, _StepTimes] = {}
        self._has_drafted = False
        """Whether the last step had drafts, and computed no prompt."""

    def drafting_pays(self, running: Sequence[Request], acceptance: float) -> bool:
        """Whether the next step shall have drafts, of which the share ``acceptance`` is likely accepted.

        Now and then the answer is not what the last measurements say, to measure again.
        """
        times = self._times.setdefault(_rounded(len(running)), _StepTimes())
        if all(request.is_decoding for request in running):
            chosen = times.to_measure()
            if chosen is not None:
                return chosen
        cost = times.cost
        return cost is None or acceptance > cost

    def record(self, plan: StepPlan, seconds: float) -> None:
        """The step took ``seconds``, drafting included.

        Steps that compute prompts are not counted, nor is the first step with drafts after others: a draft model first
        computes what it has missed.
        """
        count = len(plan.scheduled)
        if any(item.position < item.prompt_length or len(item.tokens) > item.num_drafts + 1 for item in plan.scheduled):
            self._has_drafted = False
            return
        num_drafts = sum(item.num_drafts for item in plan.scheduled)
        if self._has_drafted or not num_drafts:
            self._times.setdefault(_rounded(count), _StepTimes()).add(seconds / count, num_drafts / count)
        self._has_drafted = num_drafts > 0

    def state(self) -> dict[str, float]:
        """Number of requests, at most -> the cost of a draft token, where it is known."""
        costs = {count: times.cost for count, times in sorted(self._times.items())}
        return {str(count): cost for count, cost in costs.items() if cost is not None}


def _rounded(count: int) -> int:
    """Up to four binary digits: with 8 requests a token takes much less time than with 5."""
    unit = 1 << max(0, count.bit_length() - 4)
    return -(-count // unit) * unit
