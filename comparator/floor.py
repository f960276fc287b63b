"""Floor: how much of an error rounding explains, from the dtypes, the reduction length, the errors of the inputs and
the depth in the model.

The model of one module that computes y from x in a dtype with epsilon ``eps``:

- rounding a value once leaves a relative error of about 0.2 eps (rms of a uniform error of +-ulp/2 over a
  mantissa that is uniform in the logarithm: 0.29 x 0.72). It happens twice: to the outputs of both sides, or, beside
  a wider dtype, to the weights and to the output of the narrow side, hence a factor of sqrt(2);
- a sum of n products in float32 in another order leaves about 2^-24 sqrt(n) (Higham, Accuracy and Stability of
  Numerical Algorithms, section 3.1, with errors that are independent);
- the error e of its inputs passes through, and the module may amplify both by cancellation.

So the output's error is at most ``k sqrt(e^2 + unit^2)``. k is learned from the same module of other layers: modules
of one kind amplify alike, and a damaged one does not.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tapscope import dtypes
from tapscope.comparator.spread import QUANTILES, Spread

TAIL = (1.0, 2.0, 3.0, 5.0)
"""How much wider the floor is at each of :data:`~.spread.QUANTILES` than for the typical row."""
AMPLIFY = 4.0
"""k where no peers are known."""
AMPLIFY_TWIN = 2.5
"""k at most where inputs are equal bit for bit and so are the dtypes: there is nothing to amplify but summands."""
AMPLIFY_RANGE = (1.5, 6.0)
"""k is kept within this whatever the peers say."""
AMPLIFY_PEERS = 2.5
"""k is this times the median of what the peers show."""
DEPTH = 12.0
"""The floor without regard to inputs, in units, before the first layer; it grows with the root of the depth."""
ROW_LIMIT = 0.5
"""A row may never be off by more than this share of itself, however noisy its inputs."""
OPS_PER_LAYER = 8
"""Roundings in sequence that one decoder layer makes, where its inside was not captured."""


@dataclass(frozen=True, slots=True)
class Floor:
    """The largest errors that rounding explains, one for each test."""

    errors: tuple[float, ...]
    """At :data:`~.spread.QUANTILES`."""
    element: float
    gain: float

    def tests(self, spread: Spread) -> list[tuple[float, float, str]]:
        """(error, floor, name) of every test, in the order in which a tie is decided."""
        names = ("typical", "tail", "tail", "row")
        found = list(zip(spread.errors, self.errors, names, strict=True))
        return [*found, (abs(spread.gain), self.gain, "gain"), (spread.element, self.element, "element")]

    def worst(self, spread: Spread) -> tuple[float, float, str]:
        """The test whose error is largest beside its floor."""
        return max(self.tests(spread), key=lambda t: score(t[0], t[1]))

    def smaller(self, other: "Floor") -> "Floor":
        """The stricter of both, test by test."""
        errors = tuple(map(min, self.errors, other.errors))
        return Floor(errors, min(self.element, other.element), min(self.gain, other.gain))


def score(error: float, floor: float) -> float:
    """error / floor; no error is 0 whatever the floor."""
    if error == 0.0:
        return 0.0
    return error / floor if floor > 0.0 else math.inf


def unit(baseline: str, target: str, reduction: int) -> float:
    """Relative error that one module adds, computed in both dtypes; ``reduction`` is the length of its sums."""
    coarse = max(dtypes.epsilon(baseline), dtypes.epsilon(target))
    rounding = 0.2 * coarse * math.sqrt(2.0)
    # Accumulation is in float32 at least as a rule, and float64 tensors are summed in float64.
    narrow = 2.0**-53 if coarse <= 2.0**-52 else 2.0**-24
    return math.hypot(rounding, narrow * math.sqrt(max(reduction, 1)))


def local_floor(inputs: Sequence[Spread], base: float, spread: Spread, amplify: float, eps: float) -> Floor:
    """The floor of a module given the spreads of what went into it; ``base`` is its :func:`unit`."""
    few = 1.0 + 3.0 / max(spread.num_rows, 1)  # the median of few rows is as wild as their worst
    errors = []
    for i, tail in enumerate(TAIL):
        widest = max((s.errors[i] for s in inputs), default=0.0)
        errors.append(max(tail, few if i == 0 else 0.0) * amplify * math.hypot(widest, base))
    element = max((s.element for s in inputs), default=0.0)
    gain = max((abs(s.gain) for s in inputs), default=0.0)
    return Floor(
        tuple(min(e, ROW_LIMIT) for e in errors),
        min(2.0 * few * amplify * math.hypot(element, 2.0 * base), ROW_LIMIT),
        _gain_floor(spread, gain, base, eps),
    )


def depth_floor(base: float, depth: float, spread: Spread, eps: float) -> Floor:
    """The floor of a site that lies ``depth`` layers deep, whatever its inputs."""
    few = 1.0 + 3.0 / max(spread.num_rows, 1)
    grown = DEPTH * base * math.sqrt(1.0 + depth)
    errors = (max(tail, few if i == 0 else 0.0) * grown for i, tail in enumerate(TAIL))
    return Floor(
        tuple(min(e, ROW_LIMIT) for e in errors),
        min(4.0 * few * grown, ROW_LIMIT),
        _gain_floor(spread, grown, base, eps),
    )


def _gain_floor(spread: Spread, inherited: float, base: float, eps: float) -> float:
    """Rounding has no direction: a common gain beyond half an epsilon and its own sampling error is systematic."""
    rows = max(spread.num_rows, 1)
    sampling = 3.0 * max(spread.gain_sd, spread.errors[0] / rows) / math.sqrt(rows)
    return max(0.5 * eps, base) + 2.0 * inherited + sampling


def amplification(spread: Spread, inputs: Sequence[Spread], base: float) -> float:
    """By how much the typical error of a module exceeds what went in."""
    widest = max((s.errors[0] for s in inputs), default=0.0)
    return spread.errors[0] / math.hypot(widest, base)


def learned(peers: Sequence[float]) -> float:
    """k for a module whose likes in other layers amplify as ``peers`` say."""
    if len(peers) < 2:
        return AMPLIFY
    low, high = AMPLIFY_RANGE
    return min(max(AMPLIFY_PEERS * statistics.median(peers), low), high)


assert len(TAIL) == len(QUANTILES)
