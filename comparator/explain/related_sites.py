"""Related sites: the error, or the target itself, equals the value of another site (an input, a sibling, a partial
sum)."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.explain.clamping import uncapped
from tapscope.comparator.explain.error_region import ErrorRegion
from tapscope.comparator.explain.hypothesis_test import Hypothesis
from tapscope.core.site import port_of

Array = np.ndarray[Any, Any]

MIN_DIVISOR = 1e-200
"""Minimum energy used as a divisor."""
NEAR_ONE = 0.05
"""Maximum distance from 1 at which a coefficient counts as 1."""


class RelatedSite(NamedTuple):
    """The baseline values of another site, in the rows of the sample."""

    site: str
    values: Array
    """[rows, columns] values."""
    is_input: bool
    """Whether the site is an input of the culprit's own module."""


class PartialSum(NamedTuple):
    """The values of one rank before, or instead of, a sum over ranks."""

    rank: int
    values: Array


def related_sites(region: ErrorRegion, others: Iterable[RelatedSite]) -> Iterator[Hypothesis]:
    """Yield that the target equals another site's baseline, or that the other site's value was added once more or left
    out."""
    others = list(others)
    own = _find_source(region, others) if port_of(region.sample.site).startswith("in[") else ""
    for other in others:
        value = region.cut(other.values)
        if not np.isfinite(value).all() or not value.any() or _is_copy(value, region.before, region.noise):
            continue
        what = "its own input" if other.is_input else "the baseline of"
        skipped = ", so the module did nothing" if other.is_input else ""
        yield Hypothesis(
            "stand-in",
            f"target = {what} {other.site}{skipped}{own}{uncapped(value, region.before, region.noise)}",
            value,
        )
        error = np.nan_to_num(region.after - region.before)
        energy = float((value * value).sum())
        factor = float((error * value).sum()) / energy if energy > MIN_DIVISOR else 0.0
        if abs(abs(factor) - 1.0) < NEAR_ONE:
            plus = factor > 0
            sentence = (
                f"target = baseline {'+' if plus else '−'} {other.site} ({'added once more' if plus else 'left out'})"
            )
            yield Hypothesis("summand", sentence, region.before + np.sign(factor) * value)


def _find_source(region: ErrorRegion, others: Iterable[RelatedSite]) -> str:
    """Return text that names the output site whose value the baseline of an input equals; empty if there is none."""
    for other in others:
        value = region.cut(other.values)
        if ":out" in other.site and np.isfinite(value).all() and _is_copy(value, region.before, region.noise):
            return f", baseline = that of {other.site}"
    return ""


def _is_copy(value: Array, before: Array, noise: float) -> bool:
    """Return whether the other site holds the culprit's own value, like the output of a parent module."""
    return bool((np.abs(value - before) <= 2.0 * noise * np.abs(before)).all())


def partial_sums(region: ErrorRegion, parts: list[PartialSum], axis: str) -> Iterator[Hypothesis]:
    """Yield that the target is one rank's partial sum instead of the sum over ``axis``."""
    for part in parts:
        sentence = f"target = the partial sum of rank {part.rank} alone: it was not summed over {axis}"
        yield Hypothesis("missing all-reduce", sentence, region.cut(part.values))


def zero_partial_sum(region: ErrorRegion, parts: Sequence[PartialSum]) -> int | None:
    """Return the only rank whose partial sum is zero in the error region; None unless there is exactly one."""
    zero = [part.rank for part in parts if not region.cut(part.values).any()]
    return zero[0] if len(zero) == 1 < len(parts) and region.before.any() else None


def missing_all_reduce(region: ErrorRegion, others: list[PartialSum], axis: str) -> Iterator[Hypothesis]:
    """Yield that values of the ranks, which should be equal, sum to the baseline. A zero target is excluded."""
    total = np.sum([region.cut(other.values) for other in others], axis=0)
    if not region.after.any():
        return
    sentence = f"the values of the {len(others) + 1} ranks sum to the baseline: the all-reduce over {axis} is missing"
    yield Hypothesis("missing all-reduce", sentence, region.before - total)
