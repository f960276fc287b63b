"""Relatives: the error, or the target itself, is the value of another site: an input, a sibling, one rank's summand."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.explain.error_region import Damage
from tapscope.comparator.explain.hypothesis_test import Trial
from tapscope.comparator.explain.limits import uncapped

Array = np.ndarray[Any, Any]

TINY = 1e-200
"""Energy below which nothing can be divided by."""
NEAR_ONE = 0.05
"""A coefficient within this of 1 is said to be 1."""


class Relative(NamedTuple):
    """Another site's baseline values at the rows of the sample."""

    site: str
    values: Array
    """[rows, columns]."""
    is_input: bool
    """Whether it goes into the culprit's own module."""


class Summand(NamedTuple):
    """What one rank held before, or instead of, a sum over ranks."""

    rank: int
    values: Array


def relatives(damage: Damage, others: Iterable[Relative]) -> Iterator[Trial]:
    """The target is another site's baseline; or that was added once more, or left out."""
    others = list(others)
    own = _own(damage, others) if damage.sample.site.rpartition(":")[2].startswith("in[") else ""
    for other in others:
        value = damage.cut(other.values)
        if not np.isfinite(value).all() or not value.any() or _is_copy(value, damage.before, damage.noise):
            continue
        what = "its own input" if other.is_input else "the baseline of"
        skipped = ", so the module did nothing" if other.is_input else ""
        yield Trial(
            "stand-in",
            f"target = {what} {other.site}{skipped}{own}{uncapped(value, damage.before, damage.noise)}",
            value,
        )
        error = np.nan_to_num(damage.after - damage.before)
        energy = float((value * value).sum())
        factor = float((error * value).sum()) / energy if energy > TINY else 0.0
        if abs(abs(factor) - 1.0) < NEAR_ONE:
            plus = factor > 0
            sentence = (
                f"target = baseline {'+' if plus else '−'} {other.site} ({'added once more' if plus else 'left out'})"
            )
            yield Trial("summand", sentence, damage.before + np.sign(factor) * value)


def _own(damage: Damage, others: Iterable[Relative]) -> str:
    """Whose value the baseline of an input is."""
    for other in others:
        value = damage.cut(other.values)
        if ":out" in other.site and np.isfinite(value).all() and _is_copy(value, damage.before, damage.noise):
            return f", baseline = that of {other.site}"
    return ""


def _is_copy(value: Array, before: Array, noise: float) -> bool:
    """Whether the other site shows the culprit's own value, as a parent's output does."""
    return bool((np.abs(value - before) <= 2.0 * noise * np.abs(before)).all())


def summands(damage: Damage, parts: list[Summand], axis: str) -> Iterator[Trial]:
    """One rank's summand stands for the sum over ``axis``."""
    for part in parts:
        sentence = f"target = the summand of rank {part.rank} alone: it was not added up over {axis}"
        yield Trial("missing all-reduce", sentence, damage.cut(part.values))


def lost_summand(damage: Damage, parts: Sequence[Summand]) -> int | None:
    """The one rank whose summand is zero wherever the sum is off, and the others' are not."""
    zero = [part.rank for part in parts if not damage.cut(part.values).any()]
    return zero[0] if len(zero) == 1 < len(parts) and damage.before.any() else None


def unsummed(damage: Damage, others: list[Summand], axis: str) -> Iterator[Trial]:
    """What the ranks hold should be equal; added up it is the baseline. A rank that holds zeros lacks no sum."""
    total = np.sum([damage.cut(other.values) for other in others], axis=0)
    if not damage.after.any():
        return
    sentence = (
        f"the values of the {len(others) + 1} ranks add up to the baseline: the all-reduce over {axis} is missing"
    )
    yield Trial("missing all-reduce", sentence, damage.before - total)
