"""Scale and offset: the target is the baseline multiplied by, or plus, a number: global, per channel or per token.

Fits are cross-validated: each half of the values is predicted from the fit of the other half.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tapscope.comparator.explain.error_region import ErrorRegion
from tapscope.comparator.explain.hypothesis_test import MIN_INTEGERS, MIN_VALUES, MIN_VALUES_OF_ANY, Hypothesis
from tapscope.comparator.explain.norms import is_norm
from tapscope.core.site import is_parameter, module_of

Array = np.ndarray[Any, Any]

LOSS_OF_RANK = "loss of a rank"
"""Name of the family in which one gradient is of the loss of one data-parallel rank, and the other of the loss of
all."""
_DATA_PARALLEL = frozenset({"dp", "dp_shard", "dp_replicate", "fsdp"})
_ROUTERS = ("gate", "router")
"""Suffixes of the names of modules that choose experts."""
MIN_RATE = 0.005
"""Minimum fraction of zeroed values."""
PATTERNS = 6
"""Number of leading singular vectors of the values that are projected out, one after the other."""
MIN_RESIDUAL = 2.0
"""Minimum error outside the leading singular vectors, in units of the noise."""
MIN_RESIDUAL_SHARE = 0.8
"""Fraction of that error that a factor per channel or token must explain."""
MIN_FIT = 4
"""Minimum number of values per fitted number in each half."""


def constants(region: ErrorRegion) -> Iterator[Hypothesis]:
    """Yield targets that are zero, negated, or off by a factor that a sum over ranks explains."""
    before, after = region.before, region.after
    if not after.any():
        yield Hypothesis("zeroed", "target is zero", np.zeros_like(after))
    if region.sample.is_integer:
        return
    yield Hypothesis("sign", "target = −baseline", -before)
    yield from _dropout(before, after)
    # A sum over ranks has complete rows, and no column belongs to one rank. Norms and routers run on every rank.
    is_whole = len(region.columns) == region.sample.baseline.shape[1] and region.sample.ranks.max(initial=-1) < 0
    is_whole = is_whole and not is_norm(region.sample.site) and not is_router(region.sample.site)
    for axis, size in region.sizes.items() if is_whole else ():
        if axis in _DATA_PARALLEL and is_activation_gradient(region.sample.site):
            yield from _of_one_rank(axis, size, before)
            continue
        doubled = f"target = {size} × baseline, as if summed over {axis}={size} once too often (a doubled all-reduce)"
        yield Hypothesis("all-reduce", doubled, before * size)
        shared = f"target = baseline / {size}, as if one of {size} equal parts, or the mean over {axis}={size}"
        yield Hypothesis("all-reduce", shared, before / size)


def is_activation_gradient(site: str) -> bool:
    """Return whether the site is the gradient of an input, an output or an explicit value."""
    return site.endswith(".grad") and not is_parameter(site)


def _of_one_rank(axis: str, size: int, before: Array) -> Iterator[Hypothesis]:
    """Yield factors due to data parallelism.

    Each data-parallel rank differentiates the mean loss over its own tokens; only gradients of parameters are averaged.
    """
    usual = f"each of {axis}={size} ranks averages the loss over its own tokens; "
    usual += "gradients of parameters do not differ by this"
    yield Hypothesis(LOSS_OF_RANK, f"target = {size} × baseline, as in data parallelism: {usual}", before * size)
    yield Hypothesis(LOSS_OF_RANK, f"target = baseline / {size}, as in data parallelism: {usual}", before / size)


def is_router(site: str) -> bool:
    """Return whether the module is named like a mixture-of-experts router."""
    return module_of(site).rpartition(".")[2].endswith(_ROUTERS)


def _dropout(before: Array, after: Array) -> Iterator[Hypothesis]:
    """Yield dropout: some values are zero at random, the others scaled by 1 / (1 - p) (Srivastava et al. 2014)."""
    lost = (after == 0) & (before != 0)
    rate = float(lost.mean())
    if MIN_RATE < rate < 1 - MIN_RATE and not lost.all(axis=0).any() and lost.sum() >= MIN_VALUES:
        factor = float(_factor(before[~lost], after[~lost], None))
        if abs(factor * (1.0 - rate) - 1.0) > 0.1:
            return
        sentence = (
            f"{rate:.1%} of target's values are zero and the others {number(factor)} × baseline (dropout left on)"
        )
        yield Hypothesis("dropout", sentence, np.where(lost, 0.0, before * factor), 1)


def scales(region: ErrorRegion) -> Iterator[Hypothesis]:
    """Yield one factor for all values, one per channel, and one per token."""
    if region.sample.is_integer:
        return
    before, after = _clean(region)
    factor = _factor(before, after, None)
    board = np.add.outer(np.arange(before.shape[0]), np.arange(before.shape[1])) % 2 == 0
    if board.sum() >= MIN_VALUES_OF_ANY // 2:
        values = before * np.where(board, _factor(before[~board], after[~board], None), 0.0)
        values += before * np.where(board, 0.0, _factor(before[board], after[board], None))
        text = f"target = {number(factor, region.noise)} × baseline{_usual_factor(factor, region)}"
        yield Hypothesis("scale", text, values, 1)
    for axis, what in ((0, "channel"), (1, "token")):
        if before.shape[axis] >= 2 * MIN_FIT and before.shape[1 - axis] > 1:
            factors = _factor(before, after, axis)
            sentence = f"target = baseline × a separate factor per {what} ({_range(factors)})"
            values = _crossed(before, after, axis, _factor, np.multiply)
            spared = axis == 0 and len(region.rows) < len(region.sample.baseline)  # a weight would affect every row
            is_weight = axis == 0 and is_norm(region.sample.site)
            of_norm = axis == 1 and is_norm(region.sample.site)  # a norm's only factor per token is its statistic
            if not (spared or of_norm) and (is_weight or _holds_in_residual(region, before, after, values)):
                yield Hypothesis(f"{what} scale", sentence, values, 2)


def offsets(region: ErrorRegion) -> Iterator[Hypothesis]:
    """Yield one offset for all values, one per channel, and one per token."""
    before, after = _clean(region)
    error = after - before
    if error.size >= (MIN_INTEGERS if region.sample.is_integer else MIN_VALUES_OF_ANY):
        common = float(np.median(error)) if region.sample.is_integer else float(error.mean())
        sign = "+" if common >= 0 else "−"
        yield Hypothesis("offset", f"target = baseline {sign} {number(abs(common))}", before + common, 1)
    for axis, what in ((0, "channel"), (1, "token")):
        if before.shape[axis] >= 2 * MIN_FIT and before.shape[1 - axis] > 1:
            note = ", as from a wrong, missing or doubled bias" if axis == 0 else ""
            sentence = f"target = baseline + a separate offset per {what} ({_range(_offset(before, after, axis))})"
            yield Hypothesis(f"{what} offset", sentence + note, _crossed(before, after, axis, _offset, np.add), 2)


def _holds_in_residual(region: ErrorRegion, before: Array, after: Array, values: Array) -> bool:
    """Return whether the values also explain the error outside the baseline's leading singular vectors.

    For values of low rank, any error looks like a factor per channel or token.
    """
    weight = region.weight
    patterns = np.linalg.svd(before * weight, full_matrices=False)[0][:, :PATTERNS]
    parts = [part * weight for part in (before, after - before, after - values)]
    for count in range(1, patterns.shape[1] + 1):
        first = patterns[:, :count]
        size, old, new = (float(((part - first @ (first.T @ part)) ** 2).sum()) for part in parts)
        if old <= (MIN_RESIDUAL * region.noise) ** 2 * size:
            return count > 3
        if new > (1.0 - MIN_RESIDUAL_SHARE) * old:
            return False
    return True


def _clean(region: ErrorRegion) -> tuple[Array, Array]:
    good = np.isfinite(region.before) & np.isfinite(region.after)
    return np.where(good, region.before, 0.0), np.where(good, region.after, 0.0)


def _factor(before: Array, after: Array, axis: int | None) -> Any:
    """Return the least-squares solution of after = factor x before."""
    energy = (before * before).sum(axis=axis)
    return np.divide((before * after).sum(axis=axis), energy, out=np.ones_like(energy), where=energy > 0)


def _offset(before: Array, after: Array, axis: int) -> Array:
    offset: Array = (after - before).mean(axis=axis)
    return offset


def _crossed(before: Array, after: Array, axis: int, fit: Any, apply: Any) -> Array:
    """Fit on every other row (or column), apply to the ones in between, and vice versa."""
    values = np.empty_like(before)
    for mine, other in ((0, 1), (1, 0)):
        fitted_on = (slice(other, None, 2), slice(None)) if axis == 0 else (slice(None), slice(other, None, 2))
        judged_on = (slice(mine, None, 2), slice(None)) if axis == 0 else (slice(None), slice(mine, None, 2))
        numbers = np.expand_dims(fit(before[fitted_on], after[fitted_on], axis), axis)
        values[judged_on] = apply(before[judged_on], numbers)
    return values


def _usual_factor(factor: float, region: ErrorRegion) -> str:
    """Return text on a usual number that equals the factor, such as √head_dim; otherwise empty."""
    for name, size in [("width", region.sample.width), *(("head_dim", n) for n in region.head_dims)]:
        for sign, value in (("", size**0.5), ("1 / ", size**-0.5)):
            if size > 1 and abs(factor / value - 1.0) < max(0.001, region.noise):
                return f" (= {sign}√{name}, {size})"
    return ""


def number(value: float, noise: float = 0.0) -> str:
    """Return the value with four digits (three for coarsely rounded values), or with as many as distinguish it from
    1."""
    short = f"{value:.{3 if noise > 1e-3 else 4}g}"
    return f"(1 {'-' if value < 1 else '+'} {abs(value - 1.0):.2g})" if short == "1" and value != 1.0 else short


def _range(values: Array) -> str:
    return f"{number(float(values.min()))} to {number(float(values.max()))}"
