"""Casts: the target's values are rounded to a narrower dtype, or quantized."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tapscope.comparator.explain.error_region import ErrorRegion
from tapscope.comparator.explain.hypothesis_test import MIN_VALUES, Hypothesis
from tapscope.core import dtypes

Array = np.ndarray[Any, Any]

CAST_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_MAX_FINITE = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
MAX_COMPUTED_ENERGY = 16.0
"""Maximum error energy of computing in a dtype, relative to that of a single cast to the dtype."""
MAX_STEPS = 256
"""Number of levels of an 8-bit integer quantizer."""


def casts(region: ErrorRegion) -> Iterator[Hypothesis]:
    """Yield casts through every dtype that is narrower than the dtypes of both sides, and quantizations."""
    before, after = region.before, region.after
    if region.sample.is_integer:
        for name in ("float32", "float16", "bfloat16"):
            yield Hypothesis("cast", f"target = baseline cast through {dtypes.short(name)}", cast_through(before, name))
        yield Hypothesis("cast", "target = baseline cast through int32 (wrapped)", _wrapped(before))
        return
    for name in CAST_DTYPES:
        if dtypes.epsilon(name) <= max(map(dtypes.epsilon, region.sample.dtypes)):
            continue
        short = dtypes.short(name)
        cast = cast_through(before, name)
        yield Hypothesis("cast", f"target = baseline cast through {short}", cast)
        yield from _scaled(before, name)
        yield from _computed(before, after, cast, name)
    yield from _steps(before, after)


def overflow(before: Array, after: Array) -> str:
    """Return a sentence naming the dtype whose range explains where only the target is not finite; empty if none
    does."""
    lost = ~np.isfinite(after) & np.isfinite(before)
    if not lost.any():
        return ""
    for name, largest in (("float16", 65504.0), ("float8_e5m2", 57344.0), ("float8_e4m3fn", 448.0)):
        if np.array_equal(np.abs(before) > largest, lost) and not np.isnan(before).any():
            return f"target is not finite where |baseline| > {largest:g}, the range of {dtypes.short(name)}"
    return ""


def missing(before: Array, after: Array, noise: float) -> str:
    """Return a sentence on non-finite values in a target that agrees everywhere else; otherwise empty."""
    odd = ~np.isfinite(after) & np.isfinite(before)
    rest = np.isfinite(after) & np.isfinite(before)
    off = np.where(rest, after - before, 0.0)
    if not odd.any() or float((off**2).sum()) > (3 * noise) ** 2 * float((np.where(rest, before, 0.0) ** 2).sum()):
        return ""
    what = "NaN" if np.isnan(after[odd]).all() else "infinite" if np.isinf(after[odd]).all() else "not finite"
    return f"target is {what} there and baseline is finite; all other values agree"


def cast_through(values: Array, name: str) -> Array:
    """Return ``values`` cast to the named dtype and back, as float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float32).astype(dtypes.numpy_dtype(name)).astype(np.float64)


def _wrapped(values: Array) -> Array:
    with np.errstate(invalid="ignore"):
        return values.astype(np.int64).astype(np.int32).astype(np.float64)


def _scaled(before: Array, name: str) -> Iterator[Hypothesis]:
    """Yield FP8 casts with a scale (per tensor, token or channel) that maps the largest magnitude to the dtype's
    largest value."""
    if name not in _MAX_FINITE:
        return
    for axis, what in ((None, "one scale"), (1, "a scale for each token"), (0, "a scale for each channel")):
        largest = np.nanmax(np.abs(before), axis=axis, keepdims=True, initial=0.0, where=np.isfinite(before))
        scale = _MAX_FINITE[name] / np.where(largest > 0, largest, 1.0)
        yield Hypothesis(
            "cast",
            f"target = baseline cast through {dtypes.short(name)} with {what}",
            cast_through(before * scale, name) / scale,
        )


def _computed(before: Array, after: Array, cast: Array, name: str) -> Iterator[Hypothesis]:
    """Yield computation in a narrow dtype: all target values are representable in it, and the error has the expected
    size."""
    good = np.isfinite(after) & np.isfinite(before) & np.isfinite(cast)
    if good.sum() < 4 * MIN_VALUES or not np.array_equal(cast_through(after, name)[good], after[good]):
        return
    if np.mean(cast[good] == before[good]) > 0.5:
        return  # the baseline is representable as well
    one = float(((cast - before)[good] ** 2).sum())
    energy = float(((after - before)[good] ** 2).sum())
    share = min(1.0, MAX_COMPUTED_ENERGY * one / energy) if energy else 0.0
    short = dtypes.short(name)
    sentence = f"every value of target is a {short} number though baseline's are not: computed in, or cast to, {short}"
    yield Hypothesis("computed in", sentence, after, 1, share)


def _steps(before: Array, after: Array) -> Iterator[Hypothesis]:
    """Yield quantization in equal steps: per tensor, per token or per channel."""
    for axis, what in ((None, ""), (1, " of each token"), (0, " of each channel")):
        lines = [slice(None)] if axis is None else range(after.shape[1 - axis])
        values = np.full_like(after, np.nan)
        step = 0.0
        for line in list(lines)[:64]:
            index: Any = line if axis in (None, 1) else (slice(None), line)
            step = _step(before[index], after[index])
            if not step:
                break
            low, high = float(after[index].min()), float(after[index].max())
            values[index] = np.clip(np.round(before[index] / step) * step, low, high)
        if step:
            many = f"steps of {step:.3g}" if axis is None else f"equal steps{what}"
            yield Hypothesis(
                "quantized", f"target = baseline rounded to {many} (quantized to 8 bits or fewer)", values, 1
            )
            return


def _step(before: Array, after: Array) -> float:
    """Return the distance between adjacent levels; 0 if the values are not on equidistant levels."""
    if not np.isfinite(after).all():
        return 0.0
    levels = np.unique(after.astype(np.float32))
    if not 3 <= len(levels) <= MAX_STEPS or after.size < 4 * len(levels) or len(np.unique(before)) < 2 * len(levels):
        return 0.0
    gaps = np.diff(levels.astype(np.float64))
    step = float(gaps.min())
    counts = levels / step
    return step if float(np.abs(counts - np.round(counts)).max()) < 0.02 else 0.0
