"""Place errors: the errors of one finding, by target rank and by token."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import Struct

from tapscope.comparator.alignment.prepare import PreparedPair
from tapscope.comparator.alignment.row_join import RowJoin
from tapscope.comparator.alignment.row_map import RowMap
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.assembly.blocks import Block, Columns, Rows, blocks
from tapscope.comparator.assembly.pieces import leaves, records_over
from tapscope.comparator.metrics.joined_rows import compare_columns, overlaps
from tapscope.comparator.metrics.measure import has_masks
from tapscope.core import dtypes
from tapscope.kernels.native import RowMeasures
from tapscope.kernels.native.aggregate import ratio, row_scales

Array = np.ndarray[Any, Any]

_MAX_RUNS = 64
"""Maximum number of column ranges of a block that are attributed to ranks; beyond it, errors count for all ranks of the
block."""


class Places(Struct, frozen=True, eq=False):
    """Ranks or tokens with the largest errors of their rows; nan where an error was not measured."""

    at: Array
    """[places] int64, ascending: target ranks, or indices into :attr:`PlaceErrors.tokens`."""
    errors: Array
    """[places] float64: largest error of a row relative to the row's size.

    For a rank that holds some of the columns: norm of the difference in these columns / size of the whole row, so that
    the squares of all shards add up to the squared row error. inf where the sides are not finite in different ways.
    """
    max_abs: Array
    """[places] float64: largest absolute difference of an element."""


class FindingPlaces(Struct, frozen=True):
    """Errors of one finding, by rank and by token."""

    ranks: Places
    """Each replica is measured; a partial sum counts for every contributing rank."""
    tokens: Places
    """Empty without token rows."""


class PlaceErrors:
    """Measures findings by rank and by token."""

    def __init__(self, rows: RowMap) -> None:
        keys, inverse = np.zeros((2, 0), np.int64), np.zeros(0, np.int64)
        if rows.num_pairs:
            both = np.stack((rows.pair_request, rows.pair_position)).astype(np.int64)
            keys, inverse = np.unique(both, axis=1, return_inverse=True)
        self._token_of_pair = inverse.reshape(-1)
        self.tokens: tuple[tuple[str, int], ...] = tuple((rows.requests[r], p) for r, p in keys.T.tolist())
        """(request, position) of every token that both runs computed, in order."""

    def of(self, ready: PreparedPair, *, read: bool) -> FindingPlaces:
        """Return the errors of a pair by place.

        Without ``read``, no values are read, and errors are nan except where hashes are equal. Raises DataError, and
        WidthError like :func:`..metrics.measure.measure`.
        """
        places = _Places(self._token_of_pair, len(self.tokens))
        unread = np.nan if not read else None
        for join in ready.plan.joins:
            ranks = {record.key.rank for record in ready.right[join.target].records}
            if unread is None and not ready.equal_by_hash(join):
                places.add(_measured(ready, join), join, ranks)
            else:
                places.add_unread(0.0 if ready.equal_by_hash(join) else np.nan, join, ranks)
        return places.result()


class _Measured(Struct):
    """The row measures of one join."""

    rows: RowMeasures
    ranks: dict[int, list[tuple[Array, RowMeasures]]]
    """Rank -> (mask of the rows it holds, measures of its columns); several entries if its columns are not adjacent."""
    copies: dict[int, int]
    """Rank -> another rank with the same bytes."""


class _Places:
    """Accumulates the joins of a pair; row errors are divided by row sizes only at the end."""

    def __init__(self, token_of_pair: Array, num_tokens: int) -> None:
        self._token_of_pair, self._num_tokens = token_of_pair, num_tokens
        self._measured: list[tuple[_Measured, RowJoin]] = []
        self._ranks: dict[int, tuple[float, float]] = {}
        """Rank -> (error, max_abs)."""
        self._tokens = np.full((2, num_tokens), -1.0)
        """[error or max_abs, tokens]; -1 where the finding has no row."""
        self._unread = np.zeros(num_tokens, np.bool_)

    def add(self, measured: _Measured, join: RowJoin, ranks: set[int]) -> None:
        """Add a join that was measured."""
        self._measured.append((measured, join))
        for rank in ranks & (measured.ranks.keys() | measured.copies.keys()):
            self._ranks.setdefault(rank, (0.0, 0.0))

    def add_unread(self, error: float, join: RowJoin, ranks: set[int]) -> None:
        """Add a join that was not read: ``error`` is 0 if its hashes are equal, else nan."""
        for rank in ranks:
            if rank not in self._ranks or math.isnan(error):
                self._ranks[rank] = error, error
        if join.pairs is not None:
            at = self._token_of_pair[join.pairs]
            self._tokens[:, at] = np.maximum(self._tokens[:, at], 0.0)
            self._unread[at] |= bool(np.isnan(error))

    def result(self) -> FindingPlaces:
        """Return the errors relative to row sizes."""
        if self._measured:
            whole = RowMeasures.concat([measured.rows for measured, _ in self._measured])
            scales, first = row_scales(whole), 0
            for one, join in self._measured:
                here = scales[first : first + len(one.rows)]
                first += len(here)
                self._add_ranks(one, here)
                if join.pairs is not None:
                    at = self._token_of_pair[join.pairs]
                    np.maximum.at(self._tokens[0], at, _errors([(slice(None), one.rows)], here))
                    np.maximum.at(self._tokens[1], at, one.rows.max_abs)
        self._tokens[:, self._unread] = np.nan
        known = np.flatnonzero(self._tokens[0] != -1.0)
        ranks = sorted(self._ranks)
        measured = np.array([self._ranks[rank] for rank in ranks]).reshape(-1, 2).T
        return FindingPlaces(
            Places(np.array(ranks, np.int64), *measured), Places(known, *self._tokens[:, known].reshape(2, -1))
        )

    def _add_ranks(self, measured: _Measured, scales: Array) -> None:
        for rank, parts in measured.ranks.items():
            error = float(_errors(parts, scales).max(initial=0.0))
            peak = max((float(rows.max_abs[held].max(initial=0.0)) for held, rows in parts), default=0.0)
            for holder in (rank, *(copy for copy, of in measured.copies.items() if of == rank)):
                before = self._ranks.get(holder, (0.0, 0.0))
                self._ranks[holder] = max(before[0], error), max(before[1], peak)


def _errors(parts: Sequence[tuple[Any, RowMeasures]], scales: Array) -> Array:
    """Return the error of some columns of each row relative to the row size, as float64 [rows]."""
    squares, odd = np.zeros(len(scales)), np.zeros(len(scales), np.bool_)
    for held, rows in parts:
        squares[held] += rows.sum_sq_diff[held]
        odd[held] |= rows.nonfinite_mismatch[held] > 0
    return np.where(odd, np.inf, ratio(np.sqrt(squares), scales))


def _measured(ready: PreparedPair, join: RowJoin) -> _Measured:
    whole, layouts, masks = ready.right[join.target], ready.layouts, has_masks(ready)
    base = ready.left[join.baseline]
    assert base.piece is not None
    assert whole.piece is not None
    left = blocks(base.piece, base.run, layouts[0].axes)
    measured = _Measured(RowMeasures.concat([]), {}, {})
    for piece in (whole.piece, *(other for _, other, _ in whole.replicas)):
        rows: RowMeasures | None = None
        ranks: dict[int, list[tuple[Array, RowMeasures]]] = {}
        for offset, one, two in overlaps(left, blocks(piece, whole.run, layouts[1].axes)):
            for start, stop, holders in _runs(two, join.target_rows):
                some = Columns(one.block, one.start + start, one.start + stop)
                part = compare_columns(some, Columns(two.block, two.start + start, two.start + stop), join, masks=masks)
                rows = part if rows is None else rows.merge_columns(part, offset + start)
                for rank, held in holders:
                    ranks.setdefault(rank, []).append((held, part))
        if piece is whole.piece and rows is not None:
            measured.rows = rows
        measured.ranks = ranks | measured.ranks
    measured.copies = _copies(whole, measured.ranks.keys())
    return measured


def _copies(whole: AssembledTensor, known: Any) -> dict[int, int]:
    """Return rank -> known rank, for ranks that hold the same bytes as a rank in ``known``, by the recorded hashes."""
    assert whole.piece is not None
    first = {(r.hash, r.shape): r.key.rank for r in leaves(whole.piece) if r.hash is not None and r.key.rank in known}
    return {
        r.key.rank: first[r.hash, r.shape]
        for r in whole.records
        if r.key.rank not in known and r.hash is not None and (r.hash, r.shape) in first
    }


def _runs(columns: Columns, rows: Rows) -> Iterator[tuple[int, int, list[tuple[int, Array]]]]:
    """Yield (first column, end, [(rank, mask of the rows it holds)]) of each column range held by the same ranks."""
    block, width = columns.block, columns.width
    index = np.arange(*rows.indices(block.num_rows)) if isinstance(rows, slice) else rows
    everything = np.ones(len(index), np.bool_)
    ranks = [block.rank] if block.rank is not None else sorted({r.key.rank for r in leaves(block.piece)})
    if len(ranks) < 2 or not len(index):
        yield 0, width, [(rank, everything) for rank in ranks]
        return
    where = np.arange(columns.start, columns.stop)
    by_column = _held(block, np.broadcast_to(index[:1], where.shape), where, ranks)
    changes = (by_column[:, 1:] != by_column[:, :-1]).any(0)
    cuts = [0, *(np.flatnonzero(changes) + 1).tolist(), width]
    if len(cuts) - 1 > _MAX_RUNS:
        yield 0, width, [(rank, everything) for rank in ranks]
        return
    for start, stop in pairwise(cuts):
        by_row = _held(block, index, np.broadcast_to(where[start : start + 1], index.shape), ranks)
        yield start, stop, [(rank, held) for rank, held in zip(ranks, by_row, strict=True) if held.any()]


def _held(block: Block, rows: Array, columns: Array, ranks: Sequence[int]) -> Array:
    """Return whether each rank contributes to each element, given by row and column, as bool [ranks, elements]."""
    shape = block.piece.shape
    others = [i for i in range(len(shape)) if i not in block.axes]
    columns = columns // (2 if (next(leaves(block.piece)).dtype or "") in dtypes.COMPLEX else 1)
    at: dict[int, Array] = {}
    for axes, flat in ((block.axes, rows), (others, columns)):
        if axes:
            at |= dict(zip(axes, np.unravel_index(flat, [shape[i] for i in axes]), strict=True))
    is_held = np.zeros((len(ranks), len(rows)), np.bool_)
    for record, which, _ in records_over(block.piece, [at[i] for i in range(len(shape))], np.arange(len(rows))):
        is_held[ranks.index(record.key.rank), which] = True
    return is_held
