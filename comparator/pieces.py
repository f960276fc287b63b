"""Pieces: a tensor that lies in several records, as an expression over them that is opened only when values are
needed."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tapscope.record import Record
from tapscope.run import Run

Array = np.ndarray[Any, Any]

_CHUNK = 1 << 20
"""Elements added up at a time."""


class Block(NamedTuple):
    """Some columns of the rows of a tensor."""

    offset: int
    """First column within the whole width."""
    values: Array
    """[rows, columns], a view where the bytes allow it."""
    rank: int | None
    """The rank whose record this is; None where several ranks were added up or it is the same on all."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One record as it lies."""

    record: Record

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape on disk."""
        return self.record.shape

    def open(self, run: Run) -> Array:
        """The mapped array."""
        return run.array(self.record)


@dataclass(frozen=True, slots=True)
class Joined:
    """Shards side by side along a tensor axis."""

    axis: int
    parts: tuple["Piece", ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        first = self.parts[0].shape
        return (*first[: self.axis], sum(p.shape[self.axis] for p in self.parts), *first[self.axis + 1 :])

    def open(self, run: Run) -> Array:
        """A copy."""
        return np.concatenate([part.open(run) for part in self.parts], axis=self.axis)


@dataclass(frozen=True, slots=True)
class Summed:
    """Summands of one whole."""

    parts: tuple["Piece", ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each summand."""
        return self.parts[0].shape

    def open(self, run: Run) -> Array:
        """The sum in float32, or in float64 where the summands are wider than float32 or integers."""
        arrays = [np.ascontiguousarray(part.open(run)).reshape(-1) for part in self.parts]
        wide = np.float64 if any(a.dtype.itemsize > 4 or a.dtype.kind in "iub" for a in arrays) else np.float32
        total = np.empty(arrays[0].shape, wide)
        for start in range(0, total.size, _CHUNK):
            cut = slice(start, start + _CHUNK)
            total[cut] = arrays[0][cut]
            for other in arrays[1:]:
                total[cut] += other[cut].astype(wide)
        return total.reshape(self.shape)


Piece = Leaf | Joined | Summed


def leaves(piece: Piece) -> Iterator[Record]:
    """The records of a piece, in column order."""
    if isinstance(piece, Leaf):
        yield piece.record
    else:
        for part in piece.parts:
            yield from leaves(part)


def is_joined(piece: Piece) -> bool:
    """Whether the whole holds the elements of its records, each once: shards do, summands do not."""
    if isinstance(piece, Leaf):
        return True
    return isinstance(piece, Joined) and all(map(is_joined, piece.parts))


def blocks(piece: Piece, run: Run, token_axes: tuple[int, ...], offset: int = 0) -> Iterator[Block]:
    """The piece as column blocks of [rows, width], where ``token_axes`` are flattened to rows.

    Shards along the first other axis stay where they lie; everything else that is spread is copied together.
    """
    others = [i for i in range(len(piece.shape)) if i not in token_axes]
    if token_axes and isinstance(piece, Joined) and piece.axis not in token_axes and _outer(piece, others) == 1:
        for part in piece.parts:
            yield from blocks(part, run, token_axes, offset)
            offset += math.prod([part.shape[i] for i in others])
        return
    rank = piece.record.key.rank if isinstance(piece, Leaf) else None
    yield Block(offset, as_rows(piece.open(run), token_axes), rank)


def _outer(piece: Joined, others: list[int]) -> int:
    """Elements that vary more slowly than the sharded axis within a row; 1 when shards are whole column ranges."""
    before = others[: others.index(piece.axis)]
    return math.prod([piece.shape[i] for i in before])


def as_rows(array: Array, token_axes: tuple[int, ...]) -> Array:
    """[rows, width]; without token axes the last axis is the width, so that a place reads like an index.

    Axes of size 1 do not count there. A complex number is two neighbouring columns.
    """
    if not token_axes:
        sizes = [n for n in array.shape if n != 1] or [1]
        rows, width = math.prod(sizes[:-1]), sizes[-1]
        moved = array
    else:
        moved = np.moveaxis(array, token_axes, range(len(token_axes)))
        rows = math.prod(moved.shape[: len(token_axes)])
        width = math.prod(moved.shape[len(token_axes) :])
    flat = np.ascontiguousarray(moved.reshape(rows, width))
    return flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat
