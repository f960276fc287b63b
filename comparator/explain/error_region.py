"""Error region: the rows and columns of a sample that differ by more than rounding explains."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from tapscope.comparator.explain.sample import Sample
from tapscope.core import dtypes

Array = np.ndarray[Any, Any]

MIN_NOISE_RATIO = 4.0
"""A row or column is affected if its error exceeds this many times the noise."""
MIN_GAP_RATIO = 2.0
"""Minimum ratio of the smallest error inside a region to the largest one outside."""
OUTSIDE_SHARE = 0.02
"""Errors below this fraction of the largest one are outside the region."""
WEAK_SHARE = 0.25
"""Among rows that stand out, errors below this fraction of the median are ignored if at most this fraction of rows has
them."""
MIN_COLUMN_SIZE = 0.25
"""Columns with a norm below this fraction of the median are assigned the noise of a column of that norm."""
OFFSET_SIZE = 1.0
"""Counterpart of :data:`MIN_COLUMN_SIZE` for columns with an offset, whose terms may cancel."""
NORMAL_QUARTILE = 0.32
"""Lower quartile of the sizes of normal numbers, in standard deviations."""
MIN_STANDARD_ERRORS = 6.0
"""Number of standard errors by which a fitted number must differ from neutral: the largest of a million independent
ones."""


@dataclass(frozen=True)
class ErrorRegion:
    """The affected rows and columns of a sample; ``noise`` is the relative error due to rounding."""

    sample: Sample
    rows: Array
    """Indices into the sample's rows."""
    columns: Array
    noise: float
    sizes: dict[str, int]
    """Mesh axis -> size, for the axes of either run that have more than one rank."""
    head_dims: tuple[int, ...] = ()
    """Head dims from the model configs of the runs."""
    is_lower_bound: bool = False
    """Whether more columns may be affected, by less than rounding reveals."""

    def cut(self, values: Array) -> Array:
        """Return the affected part of ``values`` [rows, columns]."""
        part: Array = values[np.ix_(self.rows, self.columns)]
        return part

    @cached_property
    def before(self) -> Array:
        """[rows, columns] baseline values in the region."""
        return self.cut(self.sample.baseline)

    @cached_property
    def after(self) -> Array:
        """[rows, columns] target values in the region."""
        return self.cut(self.sample.target)

    @cached_property
    def weight(self) -> Array:
        """[rows, 1] 1 / norm of the baseline's row, so that every token has equal weight."""
        weight: Array = 1.0 / self.sample.size[self.rows]
        return weight

    @property
    def is_everywhere_in_rows(self) -> bool:
        """Whether every row is affected."""
        return len(self.rows) == len(self.sample.baseline)

    @property
    def is_everywhere(self) -> bool:
        """Whether every row and every column is affected."""
        return len(self.rows) * len(self.columns) == self.sample.baseline.size


def find_error_region(
    sample: Sample, inherited: float, sizes: dict[str, int], head_dims: tuple[int, ...]
) -> ErrorRegion | None:
    """Return the error region of a sample; None if no error exceeds rounding and ``inherited``, the relative error of
    the inputs."""
    noise = 0.0 if sample.is_integer else float(np.hypot(rounding_noise(sample.dtypes), inherited))
    error = _finite(sample.target - sample.baseline)
    odd = np.isfinite(sample.target) != np.isfinite(sample.baseline)
    error[odd] = np.broadcast_to(sample.size, error.shape)[odd]
    void = (sample.baseline == 0) & (sample.target == 0)
    rows = _stand_out(np.sqrt((error**2).sum(axis=1)) / sample.size[:, 0], noise, void.all(axis=1))
    if not len(rows):
        return None
    weighted = error[rows] / sample.size[rows]
    base = np.sqrt((_finite(sample.baseline[rows] / sample.size[rows]) ** 2).sum(axis=0))
    base = np.maximum(base, MIN_COLUMN_SIZE * float(np.median(base)) or 1.0)
    columns = _stand_out(np.sqrt((weighted**2).sum(axis=0)) / base, noise, void[rows].all(axis=0))
    if not len(columns):
        columns = np.arange(sample.baseline.shape[1])
    elif len(columns) < len(base):  # judged by these columns alone, fewer rows may stand out from rounding
        part = np.sqrt((weighted[:, columns] ** 2).sum(axis=1)) / float(np.sqrt((base[columns] ** 2).sum()))
        again = _stand_out(part * float(np.sqrt(len(rows))), noise, void[rows][:, columns].all(axis=1))
        rows = rows[again] if len(again) else rows
    if len(rows) < len(sample.baseline):
        rows = rows[_not_weak(np.sqrt((error[np.ix_(rows, columns)] ** 2).sum(axis=1)) / sample.size[rows, 0])]
    return ErrorRegion(sample, rows, columns, noise, sizes, head_dims)


def _not_weak(errors: Array) -> Array:
    """Return a mask of ``errors`` that excludes a weak minority: rows whose rounding is larger than that of most
    rows."""
    weak = errors < WEAK_SHARE * float(np.median(errors))
    return ~weak if weak.mean() <= WEAK_SHARE else np.ones_like(weak)


def visible_columns(region: ErrorRegion) -> ErrorRegion:
    """Return the region without columns whose error is within rounding, unless no columns remain."""
    before, error = (_finite(side) * region.weight for side in (region.before, region.after - region.before))
    size, off = (np.sqrt((side**2).sum(axis=0)) for side in (before, error))
    shown = off > MIN_NOISE_RATIO * region.noise * np.maximum(size, MIN_COLUMN_SIZE * float(np.median(size)))
    return replace(region, columns=region.columns[shown]) if shown.any() else region


def fitted_columns(region: ErrorRegion, *, is_scaled: bool, is_offset: bool) -> ErrorRegion:
    """Return the region with all columns of the sample whose error is a factor on the baseline, a number, or both.

    ``is_scaled`` and ``is_offset`` select the fitted terms. A fitted term must exceed rounding and
    :data:`MIN_STANDARD_ERRORS` times its standard error. Over n rows, the mean of an error is known sqrt(n) times as
    well as a single error. The scatter of a column about its fit is its own, but at least that of the typical column.
    Errors common to all rows do not average out: they are estimated from the columns that differ least, and limited by
    ``noise``. A column with another kind of error is excluded. If a change of :data:`OUTSIDE_SHARE` times the typical
    one would be invisible, more columns may be affected: the region is a lower bound.
    """
    whole = replace(region, columns=np.arange(region.sample.baseline.shape[1]))
    before, error = (_finite(side) * region.weight for side in (whole.before, whole.after - whole.before))
    size = np.sqrt((before**2).mean(axis=0))
    size = np.maximum(size, (OFFSET_SIZE if is_offset else MIN_COLUMN_SIZE) * float(np.median(size)) or 1.0)
    ones = np.broadcast_to(region.weight, before.shape)
    fit = np.zeros_like(error)
    if is_offset:  # in weighted rows, a constant offset is a multiple of the weights
        share = (ones * ones).sum(axis=0)
        along = [(side * ones).sum(axis=0) / share * ones for side in (before, error)]
        fit += along[1]
        before, rest = before - along[0], error - along[1]
    else:
        rest = error
    if is_scaled:
        energy = (before**2).sum(axis=0)
        fit += np.divide((before * rest).sum(axis=0), energy, out=np.zeros_like(energy), where=energy > 0.0) * before
    freedom = max(len(fit) - is_scaled - is_offset, 1)
    scatter = np.sqrt(((error - fit) ** 2).sum(axis=0) / freedom) / size
    made = np.sqrt((fit**2).mean(axis=0)) / size
    least = np.maximum(scatter, float(np.median(scatter))) / np.sqrt(len(fit))
    shared = min(MIN_STANDARD_ERRORS * float(np.quantile(made, 0.25)) / NORMAL_QUARTILE, MIN_NOISE_RATIO * region.noise)
    visible = np.maximum(
        max(MIN_NOISE_RATIO * rounding_noise(region.sample.dtypes), shared), MIN_STANDARD_ERRORS * least
    )
    shown = made > visible
    if not shown.any():
        return region
    is_lower_bound = bool(visible[~shown].max(initial=0.0) > OUTSIDE_SHARE * float(np.median(made[shown])))
    return replace(region, columns=np.flatnonzero(shown), is_lower_bound=is_lower_bound)


def rounding_noise(names: tuple[str, str]) -> float:
    """Return the relative error of one operation: 0.29 ulp (uniform error) on either side, or a reordered float32
    sum."""
    coarse = max(map(dtypes.epsilon, names))
    return max(0.4 * coarse, 4e-6 if coarse > 1e-12 else 1e-14)


def _finite(values: Array) -> Array:
    return np.where(np.isfinite(values), values, 0.0)


def _stand_out(errors: Array, noise: float, void: Array) -> Array:
    """Return the indices of the errors that stand out; all indices if there is no gap, or if all others are ``void``
    (zero on both sides)."""
    largest = float(errors.max(initial=0.0))
    if largest == 0.0 or not largest > noise:
        return np.empty(0, np.int64)
    off = errors > max(MIN_NOISE_RATIO * noise, OUTSIDE_SHARE * largest)
    rest = float(errors[~off].max(initial=0.0))
    if not off.any() or float(errors[off].min()) < MIN_GAP_RATIO * rest or void[~off].all():
        return np.arange(len(errors))
    return np.flatnonzero(off)
