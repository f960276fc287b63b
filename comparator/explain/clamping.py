"""Clamping: the values of one side are clamped or soft-capped."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tapscope.comparator.explain.error_region import ErrorRegion
from tapscope.comparator.explain.hypothesis_test import MIN_VALUES, Hypothesis

Array = np.ndarray[Any, Any]

MIN_CLAMPED = 4
"""Minimum number of values at the limit."""
MIN_INSIDE = 0.05
"""Minimum fraction of all values (including those that agree) between the limits."""
NUM_CAPS = 48
"""Number of caps tried, from the largest magnitude to a hundred times that."""


def clamps(region: ErrorRegion) -> Iterator[Hypothesis]:
    """Yield a clamp if the target's extremes are limits that the baseline exceeds."""
    before, after = region.before, region.after
    good = np.isfinite(before) & np.isfinite(after)
    if good.sum() < MIN_VALUES:
        return
    low, high = float(after[good].min()), float(after[good].max())
    below = int(((after == low) & (before < low)).sum())
    above = int(((after == high) & (before > high)).sum())
    if max(below, above) < MIN_CLAMPED or (region.sample.is_integer and max(below, above) < MIN_VALUES):
        return
    lower, upper = (low if below >= MIN_CLAMPED else -np.inf), (high if above >= MIN_CLAMPED else np.inf)
    whole = region.sample.baseline
    if float(((whole > lower) & (whole < upper)).mean()) < MIN_INSIDE:
        return  # nearly constant
    limits = [f"at {limit:.4g}" for limit in (lower, upper) if np.isfinite(limit)]
    yield Hypothesis("clamp", f"target = baseline clamped {' and '.join(limits)}", np.clip(before, lower, upper), 1)


def clamps_of_tokens(region: ErrorRegion) -> Iterator[Hypothesis]:
    """Yield a clamp with a separate symmetric limit per row, which fits a limit that depends on the input of the
    call."""
    before, after = region.before, region.after
    if region.sample.is_integer or after.shape[1] < MIN_VALUES or not np.isfinite(after).all():
        return
    limit = np.abs(after).max(axis=1, keepdims=True)
    at = (np.abs(after) == limit) & (np.abs(before) >= limit)
    if at.sum(axis=1).min() < MIN_CLAMPED or not (limit > 0.0).all() or float(at.mean()) > 1.0 - MIN_INSIDE:
        return
    text = f"target = baseline clamped at a limit of each token ({limit.min():.4g} to {limit.max():.4g})"
    yield Hypothesis("clamp", text, np.clip(before, -limit, limit), 2)


def caps(region: ErrorRegion) -> Iterator[Hypothesis]:
    """Yield a soft cap, target = cap tanh(baseline / cap), or the reverse (Gemma 2 caps logits in this way)."""
    if region.sample.is_integer:
        return
    before, after = region.before, region.after
    good = np.isfinite(before) & np.isfinite(after)
    if good.sum() < 4 * MIN_VALUES:
        return
    for one, two, inverse in ((before, after, False), (after, before, True)):
        smaller = np.abs(two[good]) <= np.abs(one[good]) * (1 + 1e-6)
        if float(np.mean(smaller)) < 0.99 or not two[good].any():
            continue  # a cap never increases a magnitude
        cap = _fit(one[good], two[good])
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.where(np.abs(before) < cap, before / cap, np.nan)
            values = cap * np.arctanh(ratio) if inverse else cap * np.tanh(before / cap)
        say = f"target lacks baseline's soft cap, {cap:.4g} × tanh(x / {cap:.4g})" if inverse else ""
        yield Hypothesis("soft cap", say or f"target = {cap:.4g} × tanh(baseline / {cap:.4g}) (a soft cap)", values, 1)


def uncapped(value: Array, before: Array, noise: float) -> str:
    """Return text that says that the soft cap is missing if ``before`` is a soft cap of ``value``; otherwise empty."""
    largest = float(np.abs(value).max(initial=0.0))
    if value.size < 4 * MIN_VALUES or largest == 0.0 or (np.abs(before) > np.abs(value) * (1 + 1e-6)).mean() > 0.01:
        return ""
    cap = _fit(value, before)
    left = float(((cap * np.tanh(value / cap) - before) ** 2).sum())
    off = float(((value - before) ** 2).sum())
    if left > max(16 * noise**2 * float((before**2).sum()), 0.0) or off < 100 * left:
        return ""
    return f", without baseline's soft cap ({cap:.4g} × tanh(x / {cap:.4g}))"


def _fit(one: Array, two: Array) -> float:
    """Return the cap with which ``one`` best gives ``two``: a coarse grid, then finer grids around the best cap."""
    low, high = float(np.abs(two).max()) * (1 + 1e-9), 100.0 * float(np.abs(one).max())
    for _ in range(6):
        tried = np.geomspace(low, high, NUM_CAPS)
        errors = [float(((cap * np.tanh(one / cap) - two) ** 2).sum()) for cap in tried]
        best = int(np.argmin(errors))
        low, high = float(tried[max(best - 1, 0)]), float(tried[min(best + 1, NUM_CAPS - 1)])
    return float(tried[best])
