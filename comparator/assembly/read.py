"""Read any part of a piece as an array."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from tapscope.comparator.assembly.pieces import Array, Concatenated, Leaf, Permuted, Piece, Scattered, Sliced, Summed
from tapscope.run_format.run import Run

Select = tuple[slice | Array, ...]
"""Selection per axis: a slice with start and stop, or for token axes index arrays of equal length."""


def view(piece: Piece, run: Run) -> Array | None:
    """Return the piece as a view of memory-mapped bytes; None if it is stored in several places or must be computed."""
    if isinstance(piece, Leaf):
        return run.array(piece.record).reshape(piece.shape)
    if isinstance(piece, Sliced):
        inner = view(piece.part, run)
        return None if inner is None else inner[(slice(None),) * piece.axis + (slice(piece.start, piece.stop),)]
    if isinstance(piece, Permuted):
        inner = view(piece.part, run)
        return None if inner is None else inner.transpose(piece.order)
    if isinstance(piece, Scattered):
        return None
    return view(piece.parts[0], run) if len(piece.parts) == 1 and isinstance(piece, Concatenated) else None


def read(piece: Piece, run: Run, select: Select | None = None) -> Array:
    """Return the selected part of a piece, or all of it if ``select`` is None.

    Index arrays in ``select`` give [n, *sliced axes in order], slices alone the sliced shape. Raises RunCorruptError if
    bytes are missing.
    """
    if select is None:
        select = tuple(slice(0, n) for n in piece.shape)
    if isinstance(piece, Leaf):
        return _picked(run.array(piece.record).reshape(piece.shape), select)
    if isinstance(piece, Sliced):
        at = _shifted(select[piece.axis], piece.start)
        return read(piece.part, run, (*select[: piece.axis], at, *select[piece.axis + 1 :]))
    if isinstance(piece, Permuted):
        return _read_permuted(piece, run, select)
    if isinstance(piece, Scattered):
        return _read_placed(piece, run, select)
    return _read_joined(piece, run, select) if isinstance(piece, Concatenated) else _read_summed(piece, run, select)


def _picked(array: Array, select: Select) -> Array:
    """Select from an array; the indexed axis comes first in the result, whatever axes the index arrays belong to."""
    indexed = [i for i, at in enumerate(select) if not isinstance(at, slice)]
    moved = np.moveaxis(array, indexed, range(len(indexed))) if indexed else array
    rest = [at for at in select if isinstance(at, slice)]
    return np.asarray(moved[(*(select[i] for i in indexed), *rest)])


def _shifted(at: slice | Array, by: int) -> slice | Array:
    return slice(at.start + by, at.stop + by) if isinstance(at, slice) else at + by


def _read_permuted(piece: Permuted, run: Run, select: Select) -> Array:
    inner = tuple(select[piece.order.index(i)] for i in range(len(select)))
    values = read(piece.part, run, inner)
    sliced = [i for i in piece.order if isinstance(inner[i], slice)]  # axes of the part, in the requested order
    front = values.ndim - len(sliced)
    order = [front + sorted(sliced).index(i) for i in sliced]
    return values.transpose(*range(front), *order)


def _read_joined(piece: Concatenated, run: Run, select: Select) -> Array:
    at, bounds = select[piece.axis], np.cumsum([0, *(p.shape[piece.axis] for p in piece.parts)])
    if isinstance(at, slice):
        arrays = []
        for part, start, stop in zip(piece.parts, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            low, high = max(at.start, start), min(at.stop, stop)
            if low < high:
                inner = (*select[: piece.axis], slice(low - start, high - start), *select[piece.axis + 1 :])
                arrays.append(read(part, run, inner))
        if not arrays:
            return read(piece.parts[0], run, (*select[: piece.axis], slice(0, 0), *select[piece.axis + 1 :]))
        axis = sum(isinstance(s, slice) for s in select[: piece.axis]) + (not all(isinstance(s, slice) for s in select))
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=axis)
    owner = np.searchsorted(bounds, at, side="right") - 1
    out: Array | None = None
    for index in np.unique(owner).tolist():
        mine = owner == index
        inner = tuple(s if isinstance(s, slice) else s[mine] for s in select)
        inner = (*inner[: piece.axis], inner[piece.axis] - bounds[index], *inner[piece.axis + 1 :])
        values = read(piece.parts[index], run, inner)
        if out is None:
            out = np.empty((len(at), *values.shape[1:]), values.dtype)
        out[mine] = values
    return read(piece.parts[0], run, select) if out is None else out


def _read_placed(piece: Scattered, run: Run, select: Select) -> Array:
    at = select[piece.axis]
    if isinstance(at, slice):
        return _read_placed_slice(piece, run, select, np.arange(at.start, at.stop))
    order = np.argsort(piece.rows, kind="stable")
    first, last = (np.searchsorted(piece.rows[order], at, side) for side in ("left", "right"))
    owner = np.repeat(np.arange(len(at)), last - first)
    rows = order[np.arange(len(owner)) - np.repeat(np.cumsum(last - first) - last, last - first)]
    inner = tuple(s if isinstance(s, slice) else s[owner] for s in select)
    values = read(piece.part, run, (*inner[: piece.axis], rows, *inner[piece.axis + 1 :]))
    total = np.zeros((len(at), *values.shape[1:]), sum_dtype([values.dtype]))
    np.add.at(total, owner, values.astype(total.dtype))
    return total


def _read_placed_slice(piece: Scattered, run: Run, select: Select, at: Array) -> Array:
    """Read a slice of the scattered axis as an index array, and move the result back to that axis."""
    indexed = [s for s in select if not isinstance(s, slice)]
    num = len(indexed[0]) if indexed else 1
    every = [s if isinstance(s, slice) else np.repeat(s, len(at)) for s in select]
    every[piece.axis] = np.tile(at, num)
    values = _read_placed(piece, run, tuple(every))
    before = sum(isinstance(s, slice) for s in select[: piece.axis])
    values = np.moveaxis(values.reshape(num, len(at), *values.shape[1:]), 1, 1 + before)
    return values if indexed else values[0]


def _read_summed(piece: Summed, run: Run, select: Select) -> Array:
    arrays = [read(part, run, select) for part in piece.parts]
    wide = sum_dtype(a.dtype for a in arrays)
    if len(arrays) == 1:
        return arrays[0].astype(wide)
    total: Array = np.add(arrays[0], arrays[1], dtype=wide, casting="unsafe")  # numpy casts in cache-sized chunks
    for other in arrays[2:]:
        np.add(total, other, out=total, dtype=wide, casting="unsafe")
    return total


def sum_dtype(kinds: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    """Return the dtype in which partial sums accumulate.

    complex128 for complex and int64 for integer dtypes; float64 if any summand has 32 bits or more, else float32.
    """
    dtypes = list(kinds)
    if any(k.kind == "c" for k in dtypes):
        return np.dtype(np.complex128)
    if all(k.kind in "iub" for k in dtypes):
        return np.dtype(np.int64)
    return np.dtype(np.float64 if any(k.itemsize >= 4 for k in dtypes) else np.float32)
