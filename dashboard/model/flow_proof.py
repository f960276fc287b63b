"""Proof that a tensor is a simple function of earlier tensors, by comparing their values."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

CAST, SLICE, CONCATENATE, SELECT_ROWS, ADD, MULTIPLY = "cast", "slice", "concatenate", "select rows", "add", "multiply"
SAMPLE = 1 << 16
"""Maximum number of compared elements; evenly spaced rows of larger tensors are sampled."""
EVIDENCE = 8
"""Minimum number of distinct values in a proof, since few values may be equal by chance."""
_PROBE = 64
"""Number of elements compared first."""
_MAX_BYTES = 1 << 24
"""Maximum size of a tensor that is searched for bytes."""
_MAX_HITS = 16
_ARITHMETIC = frozenset({"float16", "bfloat16", "float32", "float64"})


def function_of(value: Array, earlier: Sequence[Array]) -> tuple[str, tuple[int, ...]] | None:
    """Return the function that yields ``value`` and its argument indices in ``earlier``; None without a proof.

    Tries a cast, a slice and a concatenation along one axis, a selection of matrix rows in any order, and the sum and
    the product of two values. Sums and products are computed in float32 (in float64 if a value is float64) and rounded
    to the dtype, as PyTorch does. Later candidates are tried first.
    """
    if not is_evidence(value):
        return None
    with np.errstate(all="ignore"):
        for find in (_cast, _pieces, _rows, _elementwise):
            proof = find(value, earlier)
            if proof is not None:
                return proof
    return None


def is_evidence(value: Array) -> bool:
    """Return whether the tensor has enough distinct floating-point values that a match is not chance."""
    return is_float(value) and _num_distinct(_sample(value)) >= EVIDENCE


def is_float(value: Array) -> bool:
    """Return whether the dtype is a real floating-point type, including bf16 and fp8."""
    return str(value.dtype.name).startswith(("float", "bfloat"))


def _cast(value: Array, earlier: Sequence[Array]) -> tuple[str, tuple[int, ...]] | None:
    for i in reversed(range(len(earlier))):
        other = earlier[i]
        is_candidate = is_float(other) and other.dtype != value.dtype and other.shape == value.shape
        if is_candidate and _equal_bits(_sample(other).astype(value.dtype), _sample(value)):
            return CAST, (i,)
    return None


def _pieces(value: Array, earlier: Sequence[Array]) -> tuple[str, tuple[int, ...]] | None:
    """Reshape to [outer, inner] per axis and test for a slice of another value's rows, or a concatenation."""
    for outer in dict.fromkeys(prod(value.shape[:axis]) for axis in range(value.ndim)):
        rows = value.reshape(outer, -1)
        others = {
            i: other.reshape(outer, -1)
            for i, other in enumerate(earlier)
            if other.dtype == value.dtype and other.size and other.size % outer == 0
        }
        for i, other in reversed(others.items()):
            if other.shape[1] > rows.shape[1] and _has_part(other, rows):
                return SLICE, (i,)
        parts = _parts(rows, others)
        if len(parts) > 1:
            return CONCATENATE, tuple(parts)
    return None


def _has_part(whole: Array, part: Array) -> bool:
    """Return whether ``part`` is a contiguous range of columns of ``whole``, both [rows, columns]."""
    if whole[0].nbytes > _MAX_BYTES:
        return False
    text, wanted, size = whole[0].tobytes(), part[0, :_PROBE].tobytes(), part.dtype.itemsize
    at = -1
    for _ in range(_MAX_HITS):
        at = text.find(wanted, at + 1)
        if at < 0:
            return False
        first = at // size
        stop = first + part.shape[1]
        if at % size == 0 and stop <= whole.shape[1] and _same_rows(whole[:, first:stop], part):
            return True
    return False


def _parts(rows: Array, others: dict[int, Array]) -> list[int]:
    """Return the indices of the values whose rows concatenate to ``rows``; empty if there are none."""
    indices: list[int] = []
    at = 0
    while at < rows.shape[1]:
        left = rows[:, at:]
        fitting = [
            (other.shape[1], i)
            for i, other in others.items()
            if other.shape[1] <= left.shape[1] - (not at) and _same_rows(other, left[:, : other.shape[1]])
        ]
        width, i = max(fitting, default=(0, -1))
        if not width or _num_distinct(_lead(others[i])) < EVIDENCE:
            return []
        indices.append(i)
        at += width
    return indices


def _rows(value: Array, earlier: Sequence[Array]) -> tuple[str, tuple[int, ...]] | None:
    if value.ndim < 2 or value.shape[-1] < EVIDENCE:
        return None
    rows = value.reshape(-1, value.shape[-1])
    rows = rows[_spaced(len(rows), max(SAMPLE // rows.shape[1], 1))]
    wanted = {row.tobytes() for row in rows}
    for i in reversed(range(len(earlier))):
        other = earlier[i]
        if other.dtype != value.dtype or other.shape[-1:] != value.shape[-1:] or other.nbytes > _MAX_BYTES:
            continue
        others = other.reshape(-1, value.shape[-1])
        if np.isin(_bits(rows[:, 0]), _bits(others[:, 0])).all() and wanted <= {row.tobytes() for row in others}:
            return SELECT_ROWS, (i,)
    return None


def _elementwise(value: Array, earlier: Sequence[Array]) -> tuple[str, tuple[int, ...]] | None:
    places = [i for i, other in enumerate(earlier) if _broadcasts(other, value.shape)]
    if len(places) < 2 or value.dtype.name not in _ARITHMETIC:
        return None
    is_double = any(array.dtype.name == "float64" for array in [value, *(earlier[i] for i in places)])
    wide = np.float64 if is_double else np.float32
    at = np.unravel_index(_spaced(value.size, _PROBE), value.shape)
    probe = value[at]
    probes = np.stack([np.broadcast_to(earlier[i], value.shape)[at].astype(wide) for i in places])
    for name, function in ((ADD, np.add), (MULTIPLY, np.multiply)):
        results = function(probes[:, None], probes[None, :]).astype(value.dtype)
        for one, other in np.argwhere((results == probe).all(axis=-1))[::-1].tolist():
            if one < other:
                pair = (_sample(np.broadcast_to(earlier[places[i]], value.shape)) for i in (one, other))
                if _is_result(function, tuple(pair), _sample(value), wide):
                    return name, (places[one], places[other])
    return None


def _broadcasts(value: Array, shape: tuple[int, ...]) -> bool:
    """Return whether PyTorch would broadcast the value to ``shape``."""
    if value.dtype.name not in _ARITHMETIC or value.ndim > len(shape):
        return False
    return all(own in (1, wanted) for own, wanted in zip(value.shape[::-1], shape[::-1], strict=False))


def _is_result(function: np.ufunc, pair: tuple[Array, ...], value: Array, wide: Any) -> bool:
    """Return whether the function of ``pair`` yields ``value``, and both arguments affect the result."""
    one, other = (each.astype(wide) for each in pair)
    if not np.array_equal(function(one, other).astype(value.dtype), value):
        return False
    result = value.astype(wide)
    return _num_distinct(value[(result != one) & (result != other)]) >= EVIDENCE


def _same_rows(one: Array, other: Array) -> bool:
    """Return whether two matrices of equal shape have equal bits in a sample; a few elements are compared first."""
    if not _equal_bits(one[0, :_PROBE], other[0, :_PROBE]):
        return False
    return _equal_bits(_lead(one), _lead(other))


def _lead(matrix: Array) -> Array:
    """Return evenly spaced rows of a matrix, at most SAMPLE elements."""
    columns = matrix[:, :SAMPLE]
    return columns[_spaced(len(columns), max(SAMPLE // columns.shape[1], 1))]


def _sample(value: Array) -> Array:
    """Return evenly spaced rows, flattened, at most about SAMPLE elements."""
    if value.ndim < 2:
        return value.reshape(-1)[:SAMPLE]
    columns = value[..., :SAMPLE]
    rows = _spaced(prod(value.shape[:-1]), max(SAMPLE // max(columns.shape[-1], 1), 1))
    return columns[np.unravel_index(rows, value.shape[:-1])].reshape(-1)


def _spaced(length: int, most: int) -> Array:
    return np.linspace(0, length - 1, min(length, most)).astype(np.int64)


def _equal_bits(one: Array, other: Array) -> bool:
    return np.array_equal(_bits(one), _bits(other))


def _num_distinct(values: Array) -> int:
    return len(np.unique(_bits(values)))


def _bits(values: Array) -> Array:
    flat = np.ascontiguousarray(values).reshape(-1)
    return flat.view(f"u{flat.dtype.itemsize}")
