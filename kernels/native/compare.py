"""Two matrices of any dtypes, compared row by row in one pass over their bytes, without gathering or casting copies."""

import math
from typing import Any

import numpy as np

from tapscope import dtypes
from tapscope.kernels.native import library
from tapscope.kernels.native.measure import FLOATS, INTEGERS, RowMeasures, empty

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

    Both are [rows, width] views with unit stride along the last axis and any stride between rows; they are only
    read. A complex number is taken as two neighbouring columns. The row arrays are integers, shape [pairs].

    Values are compared as numbers: in float32 where both dtypes fit it, else in float64, and two integer dtypes one
    of which has 64 bits exactly. A 64-bit integer beside a float is rounded to float64.

    Raises ValueError for shapes, strides or tolerances that cannot be meant, IndexError for a row that does not
    exist, and RunCorruptError for a dtype that tapscope does not know.
    """
    if not (0.0 <= atol < math.inf and 0.0 <= rtol < math.inf):
        raise ValueError(f"atol={atol} and rtol={rtol} must be finite and not negative")
    baseline, target, left, right, pairs = checked_pair(baseline, target, baseline_rows, target_rows)
    functions = library.functions()
    if functions is None or not pairs or not baseline.shape[1]:
        return compare_reference(baseline, target, left, right, pairs=pairs, atol=atol, rtol=rtol)
    return _compare_native(functions, baseline, target, left, right, pairs, atol, rtol)


def checked_pair(
    baseline: Array, target: Array, baseline_rows: Array | None, target_rows: Array | None
) -> tuple[Array, Array, Array | None, Array | None, int]:
    """(both matrices, both row indices, number of row pairs) as native code reads them; raises as
    :func:`compare_rows`."""
    baseline, target = _matrix("baseline", baseline), _matrix("target", target)
    if baseline.shape[1] != target.shape[1]:
        raise ValueError(f"rows must have one width, not {baseline.shape[1]} (baseline) and {target.shape[1]} (target)")
    left = _row_index("baseline_rows", baseline_rows, len(baseline))
    right = _row_index("target_rows", target_rows, len(target))
    pairs = len(baseline) if left is None else len(left)
    others = len(target) if right is None else len(right)
    if pairs != others:
        raise ValueError(f"rows must pair up: {pairs} on the baseline side, {others} on the target side")
    return baseline, target, left, right, pairs


def _matrix(name: str, array: Array) -> Array:
    if array.ndim != 2:
        raise ValueError(f"{name} must have shape [rows, width], not {array.shape}; reshape it first")
    if not array.dtype.isnative or (array.size and array.shape[1] > 1 and array.strides[1] != array.itemsize):
        raise ValueError(f"{name} must be native and have unit stride along its last axis; copy it first")
    if array.dtype.kind == "c":
        array = array.view(array.real.dtype)
    if array.dtype not in library.CODES_BY_TYPE:
        raise ValueError(f"{name} has dtype {array.dtype.name}; known: {', '.join(dtypes.NAMES)}")
    return array


def _row_index(name: str, rows: Array | None, limit: int) -> Array | None:
    if rows is None:
        return None
    rows = np.asarray(rows)
    if rows.dtype.kind not in "iu" and rows.size:
        raise ValueError(f"{name} must hold integers, not {rows.dtype.name}")
    rows = np.ascontiguousarray(rows, np.int64)
    if rows.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, not of shape {rows.shape}")
    if rows.size and not (rows.min() >= 0 and rows.max() < limit):
        raise IndexError(f"{name} holds {rows.min()}..{rows.max()}; rows run 0..{limit - 1}")
    return rows


def _compare_native(
    functions: library.Functions,
    baseline: Array,
    target: Array,
    left: Array | None,
    right: Array | None,
    pairs: int,
    atol: float,
    rtol: float,
) -> RowMeasures:
    width = baseline.shape[1]
    floats = np.empty((len(FLOATS), pairs), np.float64)
    integers = np.empty((len(INTEGERS), pairs), np.int64)
    functions.compare_rows(
        baseline.ctypes.data,
        target.ctypes.data,
        library.CODES_BY_TYPE[baseline.dtype],
        library.CODES_BY_TYPE[target.dtype],
        baseline.strides[0],
        target.strides[0],
        None if left is None else left.ctypes.data,
        None if right is None else right.ctypes.data,
        pairs,
        width,
        atol,
        rtol,
        floats.ctypes.data,
        integers.ctypes.data,
    )
    integers[-1] = width
    return RowMeasures(floats, integers)


# ---- the plain reference, which also serves where no library was built


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
    """The same in numpy: float64 temporaries of at most ``chunk`` elements, or of one column."""
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


# float64 itself may overflow, and a signalling NaN warns when it is widened: both are counted, not warned about.
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
    """0 finite, 1 NaN, 2 +inf, 3 -inf."""
    infinite = np.where(values > 0, 2, 3)
    return np.where(np.isnan(values), 1, np.where(np.isinf(values), infinite, 0))


def _is_exact(baseline: Array, target: Array) -> bool:
    kinds = baseline.dtype.kind, target.dtype.kind
    whole = all(kind in "iub" for kind in kinds)
    return whole and max(baseline.itemsize, target.itemsize) == 8


def _exact_distance(baseline: Array, target: Array) -> Array:
    """abs(baseline - target) of two integer arrays, rounded to float64 only at the end."""
    if np.uint64 not in (baseline.dtype, target.dtype):
        a, b = baseline.astype(np.int64), target.astype(np.int64)
        wrapped = (
            a.view(np.uint64),
            b.view(np.uint64),
        )  # subtracts modulo 2^64, so the larger minus the smaller is right
        return np.where(a > b, wrapped[0] - wrapped[1], wrapped[1] - wrapped[0]).astype(np.float64)
    a, b = baseline.astype(np.uint64), target.astype(np.uint64)
    exact = np.where(a > b, a - b, b - a).astype(np.float64)
    # A negative number wrapped around; its distance to an unsigned one is the sum of both magnitudes.
    negative = (baseline < 0) | (target < 0)
    return np.where(negative, np.abs(baseline.astype(np.float64) - target.astype(np.float64)), exact)
