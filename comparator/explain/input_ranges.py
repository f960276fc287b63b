"""Input ranges: one range of input columns of a linear layer accounts for its error, so part of its weight differs.

``error = x[:, C] D`` with unknown ``D``, where ``C`` is a range of columns or every n-th column of a range. For any
``D``, the error is in the span of these columns over the rows. The search finds the shortest range whose residual does
not exceed rounding. It needs more rows than columns, because only the surplus rows are evidence.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.explain.error_region import ErrorRegion
from tapscope.comparator.explain.experts import distinct
from tapscope.comparator.explain.input_columns import (
    MAX_NOISE_RATIO,
    WEIGHT_DIFFERS,
    chosen,
    has_alternatives,
    input_of,
)
from tapscope.comparator.explain.recorded_attention import SiteReader
from tapscope.comparator.explain.region_text import spans
from tapscope.comparator.verdict.explanation import Tested

Array = np.ndarray[Any, Any]

MAX_ROWS = 128
MAX_WIDTH = 1024
MAX_STRIDE = 4
PATTERNS = 12
"""Number of leading singular vectors of the error used in the search."""
MIN_SPARE = 4
"""Minimum number of rows in excess of the columns of a range."""
MAX_CHANCE = 1e-9
"""Maximum probability, over all ranges, that the error is in the span of a range by chance."""
MAX_RESIDUAL_RATIO = 3.0
"""A complete range may leave up to this many times the expected residual: input errors are not known that precisely."""
ACCEPTED_RESIDUAL = 1e-3
"""Residual that is always accepted, as a fraction of the error."""
LAST_COLUMN_RATIO = 3.0
"""A range is complete if its last column reduces the residual by this factor, whatever the expected rounding."""
INDISTINGUISHABLE_RATIO = 3.0
"""Ranges of equal length whose residuals are within this factor of the accepted residual are not distinguished."""
NUM_RANDOM_SETS = 24
"""Number of random column sets with which a range is compared."""
MIN_RANDOM_RATIO = 4.0
"""Minimum residual of each random set, relative to the accepted residual."""
MIN_COMMON_SHARE = 0.75
"""Minimum fraction of columns that indistinguishable ranges must have in common."""
SAME_IN_ALL_ROWS_RTOL = 2e-3
"""Relative tolerance at which a term counts as equal in all rows of a step: one rounding of bfloat16."""
MIN_ROW_VARIANCE = 4.0
"""Terms vary by row if their variance exceeds this many times the expected one."""
ONE_NUMBER_RESIDUAL = 0.01
"""Maximum residual energy, as a fraction, for a single number to explain the error."""
WIDTH_FRACTIONS = (8, 6, 4, 3, 2)
"""Denominators of the fractions of the width that may be exchanged with each other: halves, heads, shards."""


class InputRange(NamedTuple):
    """The shortest range of columns in one family (contiguous, every n-th, or exchanged)."""

    columns: tuple[int, ...]
    """Columns common to all indistinguishable ranges of this length."""
    length: int
    """Number of columns of the range."""
    is_complete: bool
    """Whether one column less would leave far more of the error."""
    level: float
    """Accepted residual norm: that of rounding, or that of a complete range."""
    tried: int
    """Number of ranges tried."""
    others: tuple[int, ...] = ()
    """Columns with which `columns` are exchanged; empty if they are not exchanged."""


def input_ranges(region: ErrorRegion, sites: SiteReader, ranks: int = 1) -> Tested | None:
    """Return the only range of input columns that explains the error; None if there is none, or several.

    If the input is sharded over ``ranks``, the range of one rank may also be due to that rank's partial sum.
    """
    x = input_of(region, sites)
    if x is None or x.shape[1] > MAX_WIDTH:
        return None
    sample = region.sample
    rows = distinct(x)[:MAX_ROWS]
    weight = 1.0 / sample.size[rows]
    before, after = (side[np.ix_(rows, region.columns)] * weight for side in (sample.baseline, sample.target))
    if not np.isfinite(before).all() or not np.isfinite(after).all():
        return None
    floor = MAX_NOISE_RATIO * region.noise * float(np.sqrt((before**2 + after**2).sum()))
    sentence = explained_inputs(x[rows] * weight, after - before, floor, ranks)
    return None if sentence is None else Tested("input columns", sentence, 0.0)


def shifted_inputs(region: ErrorRegion, sites: SiteReader) -> str | None:
    """Return a sentence on a number that was added to all weights of a range of input columns.

    The sum of these columns times the number must be the error of every output. None if no range explains the error, or
    several do.
    """
    x = input_of(region, sites)
    if x is None or x.shape[1] > MAX_WIDTH:
        return None
    sample = region.sample
    rows = distinct(x)[:MAX_ROWS]
    error = (sample.target - sample.baseline)[np.ix_(rows, region.columns)] / sample.size[rows]
    if not np.isfinite(error).all() or len(rows) < MIN_SPARE:
        return None
    mean = error.mean(axis=1)
    scatter = float(np.sqrt(((error - mean[:, None]) ** 2).sum() / error.shape[1]))
    fit = equal_summands(x[rows] / sample.size[rows], mean, scatter)
    if fit is None:
        return None
    columns, number = fit
    sign = "+" if number > 0 else "−"
    where = "" if len(columns) == x.shape[1] else f" in {spans('column', columns)} of its input"
    return f"the weight differs{where}: each element there is baseline's {sign} {abs(number):.4g}"


def equal_summands(x: Array, error: Array, scatter: float) -> tuple[Array, float] | None:
    """Return (columns of ``x`` [rows, n], factor) such that factor times the sum of the columns is ``error`` [rows].

    ``scatter`` is the norm of the uncertainty of ``error``. None if no columns fit, or several sets do.
    """
    width, total = x.shape[1], float((error**2).sum())
    fits: list[tuple[float, float, tuple[int, ...]]] = []
    for stride in range(1, MAX_STRIDE + 1):
        for offset in range(stride):
            columns = np.arange(offset, width, stride)
            if len(columns) < 2:
                continue
            sums = np.concatenate([np.zeros((len(x), 1)), np.cumsum(x[:, columns], axis=1)], axis=1)
            inner, outer = sums.T @ error, sums.T @ sums
            product = inner[None, :] - inner[:, None]
            energy = np.diag(outer)[None, :] + np.diag(outer)[:, None] - 2.0 * outer
            above = np.triu(np.ones(energy.shape, bool), 2 if stride > 1 else 1) & (
                energy > 1e-12 * energy.max(initial=0.0)
            )
            removed = np.where(above, product**2 / np.where(above, energy, 1.0), -1.0)
            for at in np.argsort(-removed, axis=None)[:2]:
                a, b = np.unravel_index(at, removed.shape)
                if removed[a, b] > 0.0:
                    number = float(product[a, b] / energy[a, b])
                    rest = error - number * (sums[:, b] - sums[:, a])
                    fits.append((float((rest**2).sum()), number, tuple(columns[a:b].tolist())))
    fits.sort(key=lambda one: (one[0], len(one[2])))
    if (
        not fits
        or fits[0][0] > max(scatter**2, ACCEPTED_RESIDUAL**2 * total)
        or fits[0][0] > ONE_NUMBER_RESIDUAL * total
    ):
        return None
    if len(fits) > 1 and fits[1][0] < max(MIN_RANDOM_RATIO * fits[0][0], scatter**2):
        return None
    return np.array(fits[0][2]), fits[0][1]


def is_constant_by_step(region: ErrorRegion) -> bool:
    """Return whether the same numbers, one per column, were added to every row of a step.

    The multiple of these numbers in each row is estimated from all columns. It may vary as much as the scatter of the
    columns explains, plus :data:`SAME_IN_ALL_ROWS_RTOL`. If it varies more, the added term depends on the token.
    """
    error = region.after - region.before
    step = region.sample.step[region.rows]
    varied = expected = 0.0
    for one in np.unique(step):
        here = error[step == one]
        mean = here.mean(axis=0)
        size = float(mean @ mean)
        if not size > 0.0:
            return False
        share = here @ mean / size
        scatter = ((here - share[:, None] * mean) ** 2).mean(axis=1) / size
        varied += float(((share - 1.0) ** 2).sum())
        expected += float(scatter.sum()) + len(here) * SAME_IN_ALL_ROWS_RTOL**2
    return varied <= MIN_ROW_VARIANCE * expected


def explained_inputs(x: Array, error: Array, floor: float, ranks: int = 1) -> str | None:
    """Return a sentence on the part of the weight that explains ``error`` [rows, outputs] down to a norm of ``floor``.

    ``x`` [rows, inputs] is sharded over ``ranks``. None if no part does, or the part is not unique.
    """
    total = float(np.sqrt((error**2).sum()))
    width = x.shape[1]
    if not total > 0.0 or floor > total or len(x) <= MIN_SPARE:
        return None
    left, size, _ = np.linalg.svd(error, full_matrices=False)
    patterns = left[:, :PATTERNS] * size[:PATTERNS]
    ranges = [one for one in _ranges(x, patterns, floor) if _is_significant(one, len(x), total)]
    pairs = [one for one in _exchanges(x, patterns, floor) if _is_significant(one, len(x), total)]
    best = min(ranges + pairs, key=lambda one: one.length, default=None)
    if best is None or any(one is not best and not set(best.columns) <= set(one.columns) for one in ranges):
        return None
    if not _is_unique(x, error, best):
        return None
    if best.others:
        one, two = (spans("column", columns) for columns in (best.columns, best.others))
        return f"{one} of its input are exchanged with {two} in the weight"
    columns, more, level = best.columns, "" if best.is_complete else " at least", INDISTINGUISHABLE_RATIO * best.level
    if 0 < len(few := chosen(x, error, level)) < MIN_COMMON_SHARE * best.length:  # the range has gaps
        if has_alternatives(x, error, few, level):
            return None
        columns, more = tuple(few), ""
    if len(columns) == width:
        return WEIGHT_DIFFERS
    if (rank := _rank_of(columns, width, ranks)) is not None:
        what = f"the weight (in {spans('column', columns)} of its input) or the partial sum of rank {rank} differs"
        return f"{what}; that accounts for the error"
    return f"the weight differs in {spans('column', columns)} of its input{more}; that accounts for the error"


def _rank_of(columns: Sequence[int], width: int, ranks: int) -> int | None:
    """Return the rank whose shard of the input consists of these columns; None if there is none."""
    if ranks < 2 or width % ranks or len(columns) != width // ranks or columns[0] % len(columns):
        return None
    return columns[0] // len(columns) if columns[-1] - columns[0] + 1 == len(columns) else None


def _is_significant(fit: InputRange, rows: int, total: float) -> bool:
    """Return whether chance is ruled out.

    The probability that a random direction has a share below s outside a subspace is about s to the power of the
    dimensions that the subspace lacks.
    """
    spare = rows - fit.length
    return spare >= MIN_SPARE and fit.tried * (fit.level / total) ** spare < MAX_CHANCE


def _is_unique(x: Array, error: Array, fit: InputRange) -> bool:
    """Return whether random sets of equally many columns leave far more error; correlated inputs explain each other's
    errors."""
    draw = np.random.default_rng(0)
    for _ in range(NUM_RANDOM_SETS if fit.length < x.shape[1] else 0):
        some = x[:, draw.choice(x.shape[1], fit.length, replace=False)]
        rest = error - some @ np.linalg.lstsq(some, error, rcond=None)[0]
        if float(np.sqrt((rest**2).sum())) < MIN_RANDOM_RATIO * fit.level:
            return False
    return True


def _ranges(x: Array, error: Array, floor: float) -> Iterator[InputRange]:
    """Yield the shortest contiguous range, and the shortest ranges of every second, third or fourth column."""
    width = x.shape[1]
    for stride in range(1, MAX_STRIDE + 1):
        candidates = [
            (np.arange(offset, width, stride), one)
            for offset in range(stride)
            if (one := shortest(x[:, offset::stride], error, floor)) is not None
        ]
        for columns, (starts, length, level, sure) in sorted(candidates, key=lambda one: one[1][1])[:1]:
            kept = _common([columns[start : start + length] for start in starts])
            if len(kept) >= MIN_COMMON_SHARE * length:
                yield InputRange(kept, length, sure, level, width * stride)


def _exchanges(x: Array, error: Array, floor: float) -> Iterator[InputRange]:
    """Yield the shortest ranges of columns that are exchanged with columns a fraction of the width away."""
    width = x.shape[1]
    apart = {width // share * count for share in WIDTH_FRACTIONS for count in range(1, share) if width // share * count}
    for distance in sorted(one for one in apart if 2 * one <= width):
        here = np.arange(distance if 2 * distance == width else width)
        there = (here + distance) % width
        one = shortest(x[:, here] - x[:, there], error, floor)
        if one is None:
            continue
        starts, length, level, sure = one
        kept = _common([here[start : start + length] for start in starts])
        if sure and length <= distance and len(kept) >= MIN_COMMON_SHARE * length:
            others = tuple(int(there[i]) for i in kept)
            yield InputRange(kept, length, sure, level, width * len(apart), others)


def _common(ranges: Sequence[Array]) -> tuple[int, ...]:
    kept = set(ranges[0].tolist())
    for other in ranges[1:]:
        kept &= set(other.tolist())
    return tuple(sorted(kept))


def shortest(x: Array, error: Array, floor: float) -> tuple[Array, int, float, bool] | None:
    """Return the shortest ranges of columns of ``x`` [rows, n] whose span leaves at most ``floor`` of ``error`` [rows,
    m].

    The result is (starts, length, accepted residual, whether one column less leaves far more), or None if that takes
    nearly as many columns as rows. The orthogonal bases of all ranges of one length grow by one column each
    (Gram-Schmidt, applied twice).
    """
    rows, width = x.shape
    limit = min(rows - MIN_SPARE, width)
    total = float(np.sqrt((error**2).sum()))
    basis = np.zeros((width, limit, rows))
    rest = np.broadcast_to(error, (width, *error.shape)).copy()
    lefts = [np.full(width, total)]
    for length in range(1, limit + 1):
        count = width - length + 1
        added = x.T[length - 1 :].copy()
        size = np.sqrt((added**2).sum(axis=1))
        for _ in range(2):
            known = basis[:count, : length - 1]
            added -= np.matmul(np.matmul(known, added[:, :, None])[:, None, :, 0], known)[:, 0]
        new = np.sqrt((added**2).sum(axis=1))
        unit = np.where((new > 1e-9 * size)[:, None], added / np.maximum(new, 1e-300)[:, None], 0.0)
        basis[:count, length - 1] = unit
        rest = rest[:count]
        rest -= unit[:, :, None] * np.matmul(unit[:, None, :], rest)
        lefts.append(np.sqrt((rest**2).sum(axis=(1, 2))))
    least = np.maximum([float(left.min()) for left in lefts], 1e-9 * total)
    steps = np.where(least[1:] <= MAX_RESIDUAL_RATIO * floor, least[:-1] / least[1:], 0.0)
    enough = np.flatnonzero(least <= floor)
    is_complete = bool(steps.max(initial=0.0) > LAST_COLUMN_RATIO)
    if not is_complete and (not len(enough) or enough[0] == 0):
        return None
    length = 1 + int(np.argmax(steps)) if is_complete else int(enough[0])
    level = max(float(least[length]), ACCEPTED_RESIDUAL * total) if is_complete else floor
    return np.flatnonzero(lefts[length] <= INDISTINGUISHABLE_RATIO * level), length, level, is_complete
