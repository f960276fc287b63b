"""Alike: pairs of one form whose tensors are single records as they lie.

Their rows meet at the same places, so that the rows of all such pairs whose bytes are in the same two files are one
strip, which is compared in one go.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from msgspec import Struct

from tapscope import dtypes
from tapscope.comparator.assemble import Whole
from tapscope.comparator.blocks import Rows, outermost, row_axes
from tapscope.comparator.joined_rows import Part
from tapscope.comparator.layout import Layout
from tapscope.comparator.match import Pair
from tapscope.comparator.pieces import Leaf
from tapscope.comparator.prepare import Prepared
from tapscope.comparator.series import Series
from tapscope.errors import DataError
from tapscope.kernels.native import Strip
from tapscope.run import Run

Array = np.ndarray[Any, Any]


class _Side(Struct, frozen=True, eq=False):
    """Where the rows that meet lie in one side's tensors."""

    run: Run
    rank: int
    dtype: np.dtype[Any]
    """Of what is compared: of complex numbers their parts."""
    nbytes: list[int]
    """Of each firing."""
    width: int
    counts: tuple[int, ...]
    """Rows of each join."""
    firing: Array
    """[rows]: the firing that each row is in."""
    element: Array
    """[rows]: its first element within that."""


class Alike(Struct, frozen=True, eq=False):
    """What one strip needs to know of the pairs of a form."""

    sides: tuple[_Side, _Side]
    parts: tuple[Part, ...]
    excused: tuple[tuple[int, int], ...]
    """Firings that need not be read where their hashes are equal."""

    @property
    def num_rows(self) -> int:
        """Of a pair."""
        return len(self.sides[0].firing)

    @property
    def rank(self) -> int:
        """Of the target."""
        return self.sides[1].rank

    @property
    def width(self) -> int:
        """Columns of a row, a complex number being two."""
        return self.sides[0].width

    def fits(self, pair: Pair) -> bool:
        """Whether all values of a pair of the form are there and have to be read."""
        left, right = ([f.records[0] for f in side.firings] for side in (pair.baseline, pair.target) if side)
        if any(one.entry is None for one in left) or any(one.entry is None for one in right):
            return False
        return not any(left[i].hash is not None and left[i].hash == right[j].hash for i, j in self.excused)

    def has_equal_bags(self, pair: Pair) -> bool:
        """Whether firings that meet may hold the same elements in another order."""
        left, right = ([f.records[0].bag for f in side.firings] for side in (pair.baseline, pair.target) if side)
        met = ((left[part.join.baseline], right[part.join.target]) for part in self.parts)
        return any(one is not None and two is not None and int(one, 16) == int(two, 16) for one, two in met)

    def files(self, pair: Pair) -> tuple[str, ...]:
        """The files of both sides' first firings."""
        sides = (pair.baseline, pair.target)
        return tuple([side.first.entry.file for side in sides if side is not None and side.first.entry is not None])

    def strip(self, pairs: Sequence[Pair]) -> Strip | None:
        """The rows of pairs that :meth:`fits`, one pair after the other; None where their bytes lie in several files or
        not where they should, which is said of each alone."""
        found = []
        for side, all_series in zip(
            self.sides, zip(*((p.baseline, p.target) for p in pairs), strict=True), strict=True
        ):
            if (rows := _rows(side, [series for series in all_series if series is not None])) is None:
                return None
            found.append(rows)
        (one, left), (two, right) = found
        return Strip(one, two, left, right)


def alike_of(ready: Prepared) -> Alike | None:
    """What is known of all pairs of a form once the first was prepared; None where they have to be read one by one."""
    joins, sides = ready.plan.joins, []
    for which, wholes in enumerate((ready.left, ready.right)):
        picked = [(j.target, j.target_rows) if which else (j.baseline, j.baseline_rows) for j in joins]
        if (side := _side(wholes, ready.layouts[which], picked)) is None:
            return None
        sides.append(side)
    left, right = sides
    if left.width != right.width or left.counts != right.counts or not sum(left.counts):
        return None
    parts = tuple(map(Part, joins, accumulate(left.counts, initial=0), left.counts))
    return Alike((left, right), parts, tuple((j.baseline, j.target) for j in joins if ready.may_be_equal(j)))


def _side(wholes: Sequence[Whole], layout: Layout, picked: Sequence[tuple[int, Rows]]) -> _Side | None:
    records = [w.piece.record for w in wholes if isinstance(w.piece, Leaf)]
    matrices = [outermost(r.shape, layout.axes or row_axes(r.shape)) for r in records]
    widths, kinds = {m and m[1] for m in matrices}, {(r.dtype, r.key.rank) for r in records}
    if len(records) < len(wholes) or not picked or None in matrices or len(widths) != 1 or len(kinds) != 1:
        return None
    (width,), num_rows = widths, [m[0] for m in matrices if m]
    dtype, parts = dtypes.numpy_dtype(records[0].dtype or ""), 1
    if dtype.kind == "c":
        dtype, parts = np.empty(0, dtype).real.dtype, 2
    if not width or not all(num_rows):
        return None
    width *= parts
    rows = [np.arange(*at.indices(num_rows[i])) if isinstance(at, slice) else at for i, at in picked]
    nbytes = [n * width * dtype.itemsize for n in num_rows]
    counts = tuple([len(at) for at in rows])
    firing = np.repeat([i for i, _ in picked], counts)
    return _Side(wholes[0].run, records[0].key.rank, dtype, nbytes, width, counts, firing, np.concatenate(rows) * width)


def _rows(side: _Side, series: Sequence[Series]) -> tuple[Array, Array] | None:
    """(every row of the file's bytes that begins at an element, overlapping; those that are meant)."""
    records = [firing.records[0] for one in series for firing in one.firings]
    entries = [record.entry for record in records if record.entry is not None]
    if [entry.nbytes for entry in entries] != side.nbytes * len(series) or len({entry.file for entry in entries}) > 1:
        return None
    offsets, size = np.array([entry.offset for entry in entries]), side.dtype.itemsize
    if offsets.min() < 0 or (offsets % size).any():
        return None
    try:
        data = side.run.file(records[0], max(entry.offset + entry.nbytes for entry in entries))
    except DataError:
        return None
    if data is None:
        return None
    every = np.ndarray((data.nbytes // size - side.width + 1, side.width), side.dtype, data, 0, (size, size))
    first = (offsets // size).reshape(len(series), -1)[:, side.firing] + side.element
    return every, first.reshape(-1)
