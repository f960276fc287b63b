"""Blocks: view a piece as column blocks of a [rows, width] matrix, zero-copy where the memory layout allows."""

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

import numpy as np
from msgspec import Struct

from tapscope.comparator.assembly.pieces import Array, Concatenated, Leaf, Piece, Sliced, Summed, leaves
from tapscope.comparator.assembly.read import Select, read, sum_dtype, view
from tapscope.kernels.native.row_blocks import Summands
from tapscope.run_format.run import Run

Rows = Array | slice
"""Row indices of a matrix; contiguous rows are a slice, which avoids a gather."""

MAX_ROWS = 1 << 20
"""Maximum number of matrix rows of a tensor without token rows; the metrics of each row take 160 bytes."""
_MAX_COPIED_COLUMNS = 1 << 20
"""Maximum number of columns of a block that can only be read by copying."""


class Block(Struct, frozen=True):
    """A range of columns of a tensor viewed as a matrix. A complex number takes two adjacent columns."""

    offset: int
    """Index of the first column within the full width."""
    num_rows: int
    width: int
    rank: int | None
    """Rank that recorded the block; None if several ranks are summed, or if the block is equal on all ranks."""
    values: Array | None
    """[rows, columns] view with adjacent columns; None if reading requires a copy."""
    piece: Piece
    run: Run
    axes: tuple[int, ...]
    """Axes of the piece that are flattened to rows."""
    summands: Summands | None = None
    """The block as a sum of matrix views; None if it is not a sum."""

    def rows(self, rows: Rows) -> Array:
        """Return the given rows as [n, columns]; a copy unless :attr:`values` is set and ``rows`` is a slice."""
        if self.values is not None:
            return self.values[rows]
        if self.summands is not None:
            return self.summands.select(rows).total()
        shape = self.piece.shape
        if isinstance(rows, slice) and len(self.axes) == 1 and rows.indices(self.num_rows)[2] == 1:
            (axis,), (first, stop, _) = self.axes, rows.indices(self.num_rows)
            some = tuple(slice(first, stop) if i == axis else slice(0, n) for i, n in enumerate(shape))
            values = np.moveaxis(read(self.piece, self.run, some), axis, 0)  # no gather
            return _real(np.ascontiguousarray(values.reshape(len(values), math.prod(shape) // max(shape[axis], 1))))
        index = np.arange(*rows.indices(self.num_rows)) if isinstance(rows, slice) else rows
        if self.axes:
            at = dict(zip(self.axes, np.unravel_index(index, [shape[i] for i in self.axes]), strict=True))
            select: Select = tuple(at[i] if i in at else slice(0, n) for i, n in enumerate(shape))
            values = read(self.piece, self.run, select)
        else:
            values = read(self.piece, self.run)
        width = math.prod([n for i, n in enumerate(shape) if i not in self.axes])
        return _real(np.ascontiguousarray(values.reshape(len(index), width)))

    def columns(self, start: int, stop: int) -> "Columns":
        """Return a range of the columns; ``start`` and ``stop`` count within the full width."""
        return Columns(self, start - self.offset, stop - self.offset)


class Columns(Struct, frozen=True):
    """A range of adjacent columns of a block."""

    block: Block
    start: int
    """First column, counted within the block."""
    stop: int

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.stop - self.start

    @property
    def values(self) -> Array | None:
        """[rows, columns] view; None if reading requires a copy."""
        values = self.block.values
        return values if values is None or self.width == self.block.width else values[:, self.start : self.stop]

    @property
    def summands(self) -> Summands | None:
        """The columns as a sum of matrix views; None if the block is not a sum."""
        summands = self.block.summands
        return (
            summands
            if summands is None or self.width == self.block.width
            else summands.select(np.s_[:, self.start : self.stop])
        )

    def rows(self, rows: Rows) -> Array:
        """Return the given rows, restricted to these columns, as [n, columns]."""
        return self.block.rows(rows)[:, self.start : self.stop]


def blocks(piece: Piece, run: Run, token_axes: tuple[int, ...]) -> list[Block]:
    """Return the piece as column blocks of a matrix, with ``token_axes`` flattened to rows.

    Without token axes, the width is the last axis longer than 1, so that the place of an error reads like an index.
    Preceding axes are rows, as many as fit into :data:`MAX_ROWS` rows. Shards along the outermost non-row axis stay
    separate blocks; any other distributed layout is read in parts.
    """
    return list(_blocks(piece, run, token_axes or row_axes(piece.shape), 0))


def row_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes that are rows of a tensor without token axes."""
    count = max((i for i, n in enumerate(shape) if n != 1), default=0)
    while count and math.prod(shape[:count]) > MAX_ROWS:
        count -= 1
    return tuple(range(count))


@lru_cache(maxsize=1024)
def outermost(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, int] | None:
    """Return (rows, width) if the row axes come first, otherwise None."""
    if axes != tuple(range(len(axes))):
        return None
    return math.prod(shape[: len(axes)]), math.prod(shape[len(axes) :])


def _blocks(piece: Piece, run: Run, axes: tuple[int, ...], offset: int) -> Iterator[Block]:
    if isinstance(piece, Leaf) and (matrix := outermost(piece.shape, axes)):  # fast path for the common case
        array = run.array(piece.record)
        if array.flags.c_contiguous:
            whole = _real(array if array.shape == matrix else array.reshape(matrix))
            yield Block(offset, matrix[0], whole.shape[1], piece.record.key.rank, whole, piece, run, axes)
            return
    others = [i for i in range(len(piece.shape)) if i not in axes]
    rows, width = (math.prod([piece.shape[i] for i in some]) for some in (axes, others))
    if isinstance(piece, Concatenated) and piece.axis not in axes and _outer(piece, others) == 1:
        for part in piece.parts:
            for block in _blocks(part, run, axes, offset):
                yield block
                offset = block.offset + block.width
        return
    values = _matrix(view(piece, run), axes, others)
    if values is None and width > _MAX_COPIED_COLUMNS:
        first = next(i for i in others if piece.shape[i] > 1)
        step = max(1, _MAX_COPIED_COLUMNS * piece.shape[first] // width)
        for start in range(0, piece.shape[first], step):
            cut = Sliced(first, start, min(start + step, piece.shape[first]), piece)
            for block in _blocks(cut, run, axes, offset):
                yield block
                offset = block.offset + block.width
        return
    width *= 2 if _is_complex(piece) else 1
    summands = _summands(piece, run, axes, others) if values is None else None
    yield Block(offset, rows, width, _rank(piece), values, piece, run, axes, summands)


def _summands(piece: Piece, run: Run, axes: tuple[int, ...], others: list[int]) -> Summands | None:
    if not isinstance(piece, Summed):
        return None
    parts = [_matrix(view(part, run), axes, others) for part in piece.parts]
    known = tuple([part for part in parts if part is not None])
    if len(known) < len(parts) or len({(part.shape, part.dtype) for part in known}) > 1:
        return None
    return Summands(sum_dtype([known[0].dtype]), known)


def _outer(piece: Concatenated, others: list[int]) -> int:
    """Return the number of elements that vary more slowly than the sharded axis within a row; 1 if shards are column
    ranges."""
    return math.prod([piece.shape[i] for i in others[: others.index(piece.axis)]])


def _rank(piece: Piece) -> int | None:
    while isinstance(piece, Sliced):
        piece = piece.part
    return piece.record.key.rank if isinstance(piece, Leaf) else None


def _is_complex(piece: Piece) -> bool:
    return (next(leaves(piece)).dtype or "").startswith("complex")


def _matrix(array: Array | None, axes: tuple[int, ...], others: list[int]) -> Array | None:
    """Return a [rows, width] view with adjacent columns, or None if that requires a copy."""
    if array is None:
        return None
    sides = [[(array.shape[i], array.strides[i]) for i in some] for some in (axes, others)]
    rows, columns = map(_merged, sides)
    shape = tuple(math.prod([n for n, _ in side]) for side in sides)
    together = columns == array.itemsize or (shape[1] == 1 and array.dtype.kind != "c")
    if array.size and (rows is None or not together):
        return None
    return _real(np.transpose(array, (*axes, *others)).reshape(shape))


def _merged(axes: list[tuple[int, int]]) -> int | None:
    """Return the stride of several (size, stride) axes merged into one; None if they cannot be merged."""
    longer = [(n, stride) for n, stride in axes if n != 1]
    if any(outer != inner * n for (_, outer), (n, inner) in pairwise(longer)):
        return None
    return longer[-1][1] if longer else 0


def _real(matrix: Array) -> Array:
    return matrix.view(matrix.real.dtype) if matrix.dtype.kind == "c" else matrix
