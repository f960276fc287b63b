"""Pieces: a tensor stored in several records, represented as an expression over them."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from tapscope.run_format.record import Record

Array = np.ndarray[Any, Any]


class Leaf(Struct, frozen=True, gc=False):
    """One record as stored."""

    record: Record
    is_vector: bool = False
    """Whether a scalar record is treated as a vector of one element."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Stored shape, or ``(1,)`` for a scalar treated as a vector."""
        return (1,) if self.is_vector else self.record.shape


class Sliced(Struct, frozen=True):
    """The range ``start:stop`` of a piece along one axis."""

    axis: int
    start: int
    stop: int
    part: "Piece"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        shape = self.part.shape
        return (*shape[: self.axis], self.stop - self.start, *shape[self.axis + 1 :])


class Concatenated(Struct, frozen=True):
    """Parts concatenated along one axis."""

    axis: int
    parts: tuple["Piece", ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        first = self.parts[0].shape
        return (*first[: self.axis], sum(p.shape[self.axis] for p in self.parts), *first[self.axis + 1 :])


class Summed(Struct, frozen=True):
    """Partial sums of one tensor.

    Accumulated in float32 if no summand is wider than 16 bits, else in float64; integers in int64.
    """

    parts: tuple["Piece", ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each partial sum."""
        return self.parts[0].shape


class Permuted(Struct, frozen=True):
    """A piece with permuted axes: axis i is axis ``order[i]`` of ``part``."""

    order: tuple[int, ...]
    part: "Piece"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the new order."""
        return tuple(self.part.shape[i] for i in self.order)


class Scattered(Struct, frozen=True, eq=False):
    """Rows of a piece added into a longer tensor, accumulated in the dtypes of :class:`Summed`; all other rows are
    0."""

    axis: int
    rows: Array
    """[rows of the part] int64: target row of each row; -1 drops the row."""
    num_rows: int
    part: "Piece"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the longer tensor."""
        shape = self.part.shape
        return (*shape[: self.axis], self.num_rows, *shape[self.axis + 1 :])


Piece = Leaf | Sliced | Concatenated | Summed | Permuted | Scattered


def leaves(piece: Piece) -> Iterator[Record]:
    """Yield the records of a piece, each once, in order of first use."""
    yield from {id(record): record for record in _leaves(piece)}.values()


def _leaves(piece: Piece) -> Iterator[Record]:
    if isinstance(piece, Leaf):
        yield piece.record
    elif isinstance(piece, Sliced | Permuted | Scattered):
        yield from _leaves(piece.part)
    else:
        for part in piece.parts:
            yield from _leaves(part)


def records_at(piece: Piece, at: Sequence[int]) -> Iterator[tuple[Record, tuple[int, ...]]]:
    """Yield (record, index within the record) for every record that contributes to one element; ``at`` has one index
    per axis."""
    for record, rows, index in records_over(piece, [np.array([i]) for i in at], np.zeros(1, np.int64)):
        yield from ((record, tuple(int(axis[i]) for axis in index)) for i in range(len(rows)))


def records_over(piece: Piece, at: Sequence[Array], which: Array) -> Iterator[tuple[Record, Array, Sequence[Array]]]:
    """Yield (record, contributed elements, their indices within the record) for every record that contributes to any
    element.

    ``at`` has one index array per axis; ``which`` [elements] holds the identifiers of the elements used in the result.
    """
    if not len(which):
        return
    if isinstance(piece, Leaf):
        yield piece.record, which, () if piece.is_vector else at
    elif isinstance(piece, Permuted):
        permuted = dict(zip(piece.order, at, strict=True))
        yield from records_over(piece.part, [permuted[i] for i in range(len(at))], which)
    elif isinstance(piece, Summed):
        for part in piece.parts:
            yield from records_over(part, at, which)
    else:
        for part, some, here in _along(piece, at[piece.axis]):
            inside = [here if axis == piece.axis else index[some] for axis, index in enumerate(at)]
            yield from records_over(part, inside, which[some])


def _along(piece: Sliced | Scattered | Concatenated, here: Array) -> Iterator[tuple[Piece, Array, Array]]:
    """Yield (part, positions in ``here``, their indices within the part) along the piece's axis."""
    every = np.arange(len(here))
    if isinstance(piece, Sliced):
        yield piece.part, every, here + piece.start
    elif isinstance(piece, Scattered):
        order = np.argsort(piece.rows, kind="stable")
        first, end = (np.searchsorted(piece.rows[order], here, side) for side in ("left", "right"))
        some = np.repeat(every, end - first)
        nth = np.arange(len(some)) - np.repeat(np.cumsum(end - first) - (end - first), end - first)
        yield piece.part, some, order[first[some] + nth]
    else:
        for part in piece.parts:
            length = part.shape[piece.axis]
            some = np.flatnonzero((here >= 0) & (here < length))
            yield part, some, here[some]
            here = here - length


def is_partition(piece: Piece) -> bool:
    """Return whether the whole holds each element of its records exactly once: true of shards, not of partial sums or
    crops."""
    sizes = sum(math.prod(record.shape) for record in leaves(piece))
    return not _has_sums(piece) and sizes == math.prod(piece.shape)


def _has_sums(piece: Piece) -> bool:
    if isinstance(piece, Sliced | Permuted):
        return _has_sums(piece.part)
    return isinstance(piece, Summed | Scattered) or (
        isinstance(piece, Concatenated) and any(map(_has_sums, piece.parts))
    )


def digest(piece: Piece) -> tuple[object, ...]:
    """Return the expression with the hashes of its records: equal digests mean equal tensors."""
    if isinstance(piece, Leaf):
        return ("leaf", piece.record.dtype, piece.record.shape, piece.record.hash)
    if isinstance(piece, Sliced):
        return ("cut", piece.axis, piece.start, piece.stop, digest(piece.part))
    if isinstance(piece, Permuted):
        return ("permuted", piece.order, digest(piece.part))
    if isinstance(piece, Scattered):
        return ("placed", piece.axis, piece.num_rows, piece.rows.tobytes(), digest(piece.part))
    kind = ("joined", piece.axis) if isinstance(piece, Concatenated) else ("summed",)
    return (*kind, *map(digest, piece.parts))


def same_structure(one: object, two: object) -> bool:
    """Return whether two digests belong to tensors assembled in the same way, so that they differ in hashes at most."""
    if not isinstance(one, tuple) or not isinstance(two, tuple):
        return one == two
    if one[:1] == ("leaf",) == two[:1]:
        return one[:-1] == two[:-1]
    return len(one) == len(two) and all(map(same_structure, one, two))
