"""Row-by-row comparison of two matrices of any dtypes, in one pass over their bytes, without gather or cast copies."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tapscope.kernels.native import library
from tapscope.kernels.native.measure import FLOATS, INTEGERS, RowMeasures, empty
from tapscope.kernels.native.row_blocks import Strip, Summands, checked, native_sides

Array = np.ndarray[Any, Any]

CHUNK = 65536
"""Elements that the numpy backend converts at a time."""


def compare_rows(
    baseline: Array,
    target: Array,
    baseline_rows: Array | None = None,
    target_rows: Array | None = None,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
) -> RowMeasures:
    """Compare row i of ``baseline`` with row i of ``target``, or ``baseline_rows[i]`` with ``target_rows[i]``.

    Both are [rows, width] views with unit stride along the last axis and any stride between rows; they are only read. A
    complex element is compared as two adjacent columns. The row index arrays are integers, shape [pairs].

    Values are compared as numbers: in float32 if both dtypes fit into float32, else in float64. Two integer dtypes of
    which one has 64 bits are compared exactly. A 64-bit integer compared with a float is rounded to float64.

    Raises ValueError for invalid shapes, strides or tolerances, IndexError for a row that does not exist, and
    RunCorruptError for a dtype that tapscope does not support.
    """
    if not (0.0 <= atol < math.inf and 0.0 <= rtol < math.inf):
        raise ValueError(f"atol={atol} and rtol={rtol} must be finite and not negative")
    strip = checked(baseline, target, baseline_rows, target_rows)
    return compare_strips([strip], strip.num_rows, atol=atol, rtol=rtol).rows


class Compared(NamedTuple):
    """Result of :func:`compare_strips`."""

    rows: RowMeasures
    at_worst: Array
    """[rows] float64: the baseline value at the row's largest difference; 0 if there is none."""
    strip: Array
    """[rows] int64: index of the strip with the row's largest difference; the row's first strip if there is none."""

    @staticmethod
    def empty(num_rows: int) -> "Compared":
        """Allocate results for ``num_rows`` rows."""
        rows = RowMeasures(np.empty((len(FLOATS), num_rows)), np.empty((len(INTEGERS), num_rows), np.int64))
        return Compared(rows, np.empty(num_rows), np.empty(num_rows, np.int64))

    def put(self, start: int, part: "Compared") -> None:
        """Copy the rows of ``part`` to this result, starting at row ``start``."""
        here = slice(start, start + len(part.strip))
        self.rows.floats[:, here], self.rows.integers[:, here] = part.rows.floats, part.rows.integers
        self.at_worst[here], self.strip[here] = part.at_worst, part.strip


def compare_strips(strips: Sequence[Strip], num_rows: int, *, atol: float = 0.0, rtol: float = 0.0) -> Compared:
    """Compare ``num_rows`` rows, given as strips, in one call.

    Together the strips cover every row; strips of the same rows are adjacent, from left to right. Values are compared
    as in :func:`compare_rows`. Raises ValueError and IndexError for invalid strips.
    """
    compared = Compared.empty(num_rows)
    functions = library.functions()
    if functions is None:
        _compare_strips_reference(strips, compared, atol, rtol)
        return compared
    given = [(*native_sides(strip), strip.row, strip.column) for strip in strips]
    rows = compared.rows
    functions.compare(given, atol, rtol, rows.floats, rows.integers, compared.at_worst, compared.strip)
    return compared


def _without_sums(strip: Strip) -> Strip:
    one, two = (side.total() if isinstance(side, Summands) else side for side in (strip.baseline, strip.target))
    return strip._replace(baseline=one, target=two)


# ---- numpy reference, also the fallback where no library was built


def _compare_strips_reference(strips: Sequence[Strip], out: Compared, atol: float, rtol: float) -> None:
    for number, strip in enumerate(strips):
        one, two, left, right, row, column = _without_sums(strip)
        block = compare_reference(one, two, left, right, pairs=strip.num_rows, atol=atol, rtol=rtol)
        here = slice(row, row + strip.num_rows)
        values = np.zeros(strip.num_rows)
        if one.shape[1]:
            values = one[np.arange(len(one)) if left is None else left, block.argmax].astype(np.float64)
            values = np.where(block.argmax < 0, 0.0, values)
        if number and strips[number - 1].row == row:
            before = RowMeasures(out.rows.floats[:, here], out.rows.integers[:, here])
            block = before.merge_columns(block, column)
            better = block.argmax != before.argmax
            values = np.where(better, values, out.at_worst[here])
            out.strip[here] = np.where(better, number, out.strip[here])
        else:
            out.strip[here] = number
        out.rows.floats[:, here], out.rows.integers[:, here], out.at_worst[here] = block.floats, block.integers, values


def compare_reference(
    baseline: Array,
    target: Array,
    left: Array | None = None,
    right: Array | None = None,
    *,
    pairs: int,
    atol: float = 0.0,
    rtol: float = 0.0,
    chunk: int = CHUNK,
) -> RowMeasures:
    """Compute :func:`compare_rows` in numpy, with float64 temporaries of at most ``chunk`` elements or one column."""
    width = baseline.shape[1]
    if not pairs or not width:
        return empty(pairs, width)
    columns = min(width, chunk)
    height = max(1, chunk // columns)
    parts = []
    for top in range(0, pairs, height):
        rows = slice(top, min(top + height, pairs))
        index_a = rows if left is None else left[rows]
        index_b = rows if right is None else right[rows]
        whole = empty(rows.stop - rows.start, 0)
        for start in range(0, width, columns):
            cut = slice(start, start + columns)
            whole += _compare_block(baseline[index_a, cut], target[index_b, cut], atol, rtol)
        parts.append(whole)
    return RowMeasures.concat(parts)


# float64 itself may overflow, and widening a signaling NaN warns: both are counted, so the warnings are suppressed.
@np.errstate(over="ignore", under="ignore", invalid="ignore")
def _compare_block(baseline: Array, target: Array, atol: float, rtol: float) -> RowMeasures:
    a, b = baseline.astype(np.float64), target.astype(np.float64)
    class_a, class_b = _class(a), _class(b)
    both = (class_a == 0) & (class_b == 0)
    mismatch = class_a != class_b
    a, b = np.where(both, a, 0.0), np.where(both, b, 0.0)
    distance = _exact_distance(baseline, target) if _is_exact(baseline, target) else np.abs(a - b)
    over = both & (distance > atol + rtol * np.abs(a))
    same = (both & (distance == 0)) | (~both & ~mismatch)
    counts = (same, over | mismatch, both, class_a != 0, class_b != 0, mismatch, np.ones_like(both))
    ranked = np.where(both, distance, -1.0)
    worst = ranked.argmax(axis=1)
    largest = ranked[np.arange(len(a)), worst]
    sums = (value.sum(axis=1) for value in (distance, distance * distance, a * a, b * b, a * b))
    floats = np.stack([np.maximum(largest, 0.0), *sums])
    places = np.where(largest >= 0.0, worst, -1)
    return RowMeasures(floats, np.stack([places, *(value.sum(axis=1, dtype=np.int64) for value in counts)]))


def _class(values: Array) -> Array:
    """Classify values: 0 finite, 1 NaN, 2 +inf, 3 -inf."""
    infinite = np.where(values > 0, 2, 3)
    return np.where(np.isnan(values), 1, np.where(np.isinf(values), infinite, 0))


def _is_exact(baseline: Array, target: Array) -> bool:
    kinds = baseline.dtype.kind, target.dtype.kind
    whole = all(kind in "iub" for kind in kinds)
    return whole and max(baseline.itemsize, target.itemsize) == 8


def _exact_distance(baseline: Array, target: Array) -> Array:
    """Return abs(baseline - target) of two integer arrays, rounded to float64 only at the end."""
    if np.uint64 not in (baseline.dtype, target.dtype):
        a, b = baseline.astype(np.int64), target.astype(np.int64)
        # Subtract modulo 2^64: the larger minus the smaller is then exact.
        first, second = a.view(np.uint64), b.view(np.uint64)
        return np.where(a > b, first - second, second - first).astype(np.float64)
    a, b = baseline.astype(np.uint64), target.astype(np.uint64)
    exact = np.where(a > b, a - b, b - a).astype(np.float64)
    # A negative number wrapped around; the distance to an unsigned number is the sum of both magnitudes.
    negative = (baseline < 0) | (target < 0)
    return np.where(negative, np.abs(baseline.astype(np.float64) - target.astype(np.float64)), exact)
