"""DraftPrices: whether draft tokens save more time than they take, by the times of the engine's own steps.

The price of a draft token is the time that it adds to a step, drafting included, in units of the time that a token
takes in a step without drafts. With n requests, a step with d drafts takes as long as n + price d tokens and yields n
plus the accepted ones: drafts pay while the share of accepted ones is above the price. Prices differ with the number of
requests, the model, the draft model and the machine, so that they are measured.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import StepPlan

_KEPT = 8
"""Steps whose median is the time of a step."""
_NEEDED = 3
"""Steps with and without drafts from which on a price is known."""
_REMEASURE = 512
"""Steps after the last one of a kind from which on this kind is measured afresh."""


def _samples() -> "deque[tuple[float, float]]":
    return deque(maxlen=_KEPT)


@dataclass(slots=True)
class _StepTimes:
    """Of steps with about the same number of requests."""

    plain: "deque[tuple[float, float]]" = field(default_factory=_samples)
    """(Seconds, 0) per request of the last steps without drafts."""
    drafted: "deque[tuple[float, float]]" = field(default_factory=_samples)
    """(Seconds, draft tokens) per request of the last steps with drafts."""
    since_plain: int = 0
    """Steps since the last of :attr:`plain`."""
    since_drafted: int = 0
    """Steps since the last of :attr:`drafted`."""

    @property
    def price(self) -> float | None:
        """None: not known yet."""
        if min(len(self.plain), len(self.drafted)) < _NEEDED:
            return None
        token = statistics.median(seconds for seconds, _ in self.plain)
        return max(0.0, statistics.median((seconds - token) / drafts for seconds, drafts in self.drafted) / token)

    def to_measure(self) -> bool | None:
        """Whether the next step shall have drafts, so that the price is known; None: the price decides."""
        for samples, since in ((self.drafted, self.since_drafted), (self.plain, self.since_plain)):
            if since >= _REMEASURE:
                samples.clear()  # the machine's load and the contexts' lengths are others by now
        if len(self.drafted) < _NEEDED:
            return True
        return False if len(self.plain) < _NEEDED else None

    def add(self, seconds: float, drafts: float) -> None:
        """Add a step: its duration and its number of draft tokens, both per request."""
        self.since_plain, self.since_drafted = self.since_plain + 1, self.since_drafted + 1
        if drafts:
            self.drafted.append((seconds, drafts))
            self.since_drafted = 0
        else:
            self.plain.append((seconds, 0.0))
            self.since_plain = 0


class DraftPrices:
    """Prices by the number of running requests: 1, 2, and so on up to 16, then up to 18, 20, …, 32, 36, and so on."""

    def __init__(self) -> None:
        self._times: dict[int, _StepTimes] = {}
        self._previous: tuple[int, bool] | None = None
        """Number of requests of the last step, and whether it had drafts; None: it computed prompts too."""

    def pays(self, running: Sequence[Request], acceptance: float) -> bool:
        """Whether the next step shall have drafts, of which the share ``acceptance`` is likely accepted.

        Now and then the answer is not what the last measurements say, to measure again.
        """
        times = self._times.setdefault(_rounded(len(running)), _StepTimes())
        if all(request.is_decoding for request in running):
            chosen = times.to_measure()
            if chosen is not None:
                return chosen
        price = times.price
        return price is None or acceptance > price

    def record(self, plan: StepPlan, seconds: float) -> None:
        """The step took ``seconds``, drafting included.

        Steps that compute prompts are not counted, nor is the first step with drafts after others: a draft model first
        computes what it has missed.
        """
        count = len(plan.scheduled)
        if any(item.position < item.prompt_length or len(item.tokens) > item.num_drafts + 1 for item in plan.scheduled):
            self._previous = None
            return
        num_drafts = sum(item.num_drafts for item in plan.scheduled)
        step = (count, num_drafts > 0)
        if not num_drafts or step == self._previous:
            self._times.setdefault(_rounded(count), _StepTimes()).add(seconds / count, num_drafts / count)
        self._previous = step

    def state(self) -> dict[str, float]:
        """Number of requests, at most -> the price of a draft token, where it is known."""
        prices = {count: times.price for count, times in sorted(self._times.items())}
        return {str(count): price for count, price in prices.items() if price is not None}


def _rounded(count: int) -> int:
    """Up to four binary digits: with 8 requests a token takes much less time than with 5."""
    unit = 1 << max(0, count.bit_length() - 4)
    return -(-count // unit) * unit
