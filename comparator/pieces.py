"""Pieces: a tensor that lies in several records, as an expression over them of which any part can be read alone."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapscope.record import Record
from tapscope.run import Run

Array = np.ndarray[Any, Any]
Select = tuple[slice | Array, ...]
"""What to read along each axis: slices with a start and a stop, or for the token axes index arrays of one length."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One record as it lies."""

    record: Record

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape on disk."""
        return self.record.shape


@dataclass(frozen=True, slots=True)
class Cut:
    """The part ``start:stop`` of a piece along one axis."""

    axis: int
    start: int
    stop: int
    part: "Piece"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what is left."""
        shape = self.part.shape
        return (*shape[: self.axis], self.stop - self.start, *shape[self.axis + 1 :])


@dataclass(frozen=True, slots=True)
class Joined:
    """Parts side by side along one axis."""

    axis: int
    parts: tuple["Piece", ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        first = self.parts[0].shape
        return (*first[: self.axis], sum(p.shape[self.axis] for p in self.parts), *first[self.axis + 1 :])


@dataclass(frozen=True, slots=True)
class Summed:
    """Summands of one whole. They are added in float32 where none is wider than 16 bits, else in float64; integers in
    int64."""

    parts: tuple["Piece", ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each summand."""
        return self.parts[0].shape


@dataclass(frozen=True, slots=True)
class Turned:
    """A piece with its axes in another order: axis i is axis ``order[i]`` of the part."""

    order: tuple[int, ...]
    part: "Piece"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the new order."""
        return tuple(self.part.shape[i] for i in self.order)


Piece = Leaf | Cut | Joined | Summed | Turned


def leaves(piece: Piece) -> Iterator[Record]:
    """The records of a piece, each once, in the order in which they are met first."""
    yield from {id(record): record for record in _leaves(piece)}.values()


def _leaves(piece: Piece) -> Iterator[Record]:
    if isinstance(piece, Leaf):
        yield piece.record
    elif isinstance(piece, Cut | Turned):
        yield from _leaves(piece.part)
    else:
        for part in piece.parts:
            yield from _leaves(part)


def is_joined(piece: Piece) -> bool:
    """Whether the whole holds the elements of its records, each once: shards do, summands and cropped shards do not."""
    sizes = sum(math.prod(record.shape) for record in leaves(piece))
    return not _has_sums(piece) and sizes == math.prod(piece.shape)


def _has_sums(piece: Piece) -> bool:
    if isinstance(piece, Cut | Turned):
        return _has_sums(piece.part)
    return isinstance(piece, Summed) or (isinstance(piece, Joined) and any(map(_has_sums, piece.parts)))


def digest(piece: Piece) -> tuple[object, ...]:
    """The expression with the hashes of its records: equal digests are equal tensors."""
    if isinstance(piece, Leaf):
        return ("leaf", piece.record.dtype, piece.record.shape, piece.record.hash)
    if isinstance(piece, Cut):
        return ("cut", piece.axis, piece.start, piece.stop, digest(piece.part))
    if isinstance(piece, Turned):
        return ("turned", piece.order, digest(piece.part))
    kind = ("joined", piece.axis) if isinstance(piece, Joined) else ("summed",)
    return (*kind, *map(digest, piece.parts))


def view(piece: Piece, run: Run) -> Array | None:
    """The piece as a view of mapped bytes; None where it lies in several places or has to be computed."""
    if isinstance(piece, Leaf):
        return run.array(piece.record)
    if isinstance(piece, Cut):
        inner = view(piece.part, run)
        return None if inner is None else inner[(slice(None),) * piece.axis + (slice(piece.start, piece.stop),)]
    if isinstance(piece, Turned):
        inner = view(piece.part, run)
        return None if inner is None else inner.transpose(piece.order)
    return view(piece.parts[0], run) if len(piece.parts) == 1 and isinstance(piece, Joined) else None


def read(piece: Piece, run: Run, select: Select | None = None) -> Array:
    """Part of a piece: [n, *sliced axes in order] where ``select`` has index arrays, else the sliced shape.

    Everything where ``select`` is None. Raises RunCorruptError where bytes are missing.
    """
    if select is None:
        select = tuple(slice(0, n) for n in piece.shape)
    if isinstance(piece, Leaf):
        return _picked(run.array(piece.record), select)
    if isinstance(piece, Cut):
        at = _shifted(select[piece.axis], piece.start)
        return read(piece.part, run, (*select[: piece.axis], at, *select[piece.axis + 1 :]))
    if isinstance(piece, Turned):
        return _read_turned(piece, run, select)
    return _read_joined(piece, run, select) if isinstance(piece, Joined) else _read_summed(piece, run, select)


def _picked(array: Array, select: Select) -> Array:
    """Index arrays first, whatever axis they are of."""
    indexed = [i for i, at in enumerate(select) if not isinstance(at, slice)]
    moved = np.moveaxis(array, indexed, range(len(indexed))) if indexed else array
    rest = [at for at in select if isinstance(at, slice)]
    return np.asarray(moved[(*(select[i] for i in indexed), *rest)])


def _shifted(at: slice | Array, by: int) -> slice | Array:
    return slice(at.start + by, at.stop + by) if isinstance(at, slice) else at + by


def _read_turned(piece: Turned, run: Run, select: Select) -> Array:
    inner = tuple(select[piece.order.index(i)] for i in range(len(select)))
    found = read(piece.part, run, inner)
    sliced = [i for i in piece.order if isinstance(inner[i], slice)]  # of the part, in the order asked for
    front = found.ndim - len(sliced)
    order = [front + sorted(sliced).index(i) for i in sliced]
    return found.transpose(*range(front), *order)


def _read_joined(piece: Joined, run: Run, select: Select) -> Array:
    at, bounds = select[piece.axis], np.cumsum([0, *(p.shape[piece.axis] for p in piece.parts)])
    if isinstance(at, slice):
        found = []
        for part, start, stop in zip(piece.parts, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            low, high = max(at.start, start), min(at.stop, stop)
            if low < high:
                inner = (*select[: piece.axis], slice(low - start, high - start), *select[piece.axis + 1 :])
                found.append(read(part, run, inner))
        if not found:
            return read(piece.parts[0], run, (*select[: piece.axis], slice(0, 0), *select[piece.axis + 1 :]))
        axis = sum(isinstance(s, slice) for s in select[: piece.axis]) + (not all(isinstance(s, slice) for s in select))
        return found[0] if len(found) == 1 else np.concatenate(found, axis=axis)
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


def _read_summed(piece: Summed, run: Run, select: Select) -> Array:
    arrays = [read(part, run, select) for part in piece.parts]
    wide = sum_dtype(a.dtype for a in arrays)
    total = arrays[0].astype(wide)
    for other in arrays[1:]:
        total += other.astype(wide)
    return total


def sum_dtype(kinds: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    """What summands are added in: int64 or complex128 where they are such, float64 where one has 32 bits or more, else
    float32."""
    found = list(kinds)
    if any(k.kind == "c" for k in found):
        return np.dtype(np.complex128)
    if all(k.kind in "iub" for k in found):
        return np.dtype(np.int64)
    return np.dtype(np.float64 if any(k.itemsize >= 4 for k in found) else np.float32)
