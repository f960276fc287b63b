"""Batched pairs: pairs with one shape key whose tensors are single stored records.

Their rows are at the same offsets, so the rows of all such pairs form one block per pair of files, which is compared in
one call.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec import Struct

from tapscope.comparator.alignment.layout import Layout
from tapscope.comparator.alignment.prepare import PreparedPair
from tapscope.comparator.alignment.row_join import RowJoin
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.assembly.blocks import Rows, outermost, row_axes
from tapscope.comparator.assembly.pieces import Leaf
from tapscope.comparator.matching.match import Pair
from tapscope.comparator.metrics.joined_rows import ReadJoin
from tapscope.comparator.runs.series import Series, spans_of
from tapscope.core import dtypes
from tapscope.core.errors import DataError
from tapscope.kernels.native import Strip
from tapscope.run_format.run import Run

Array = np.ndarray[Any, Any]


Reading = Literal["all", "nothing"]


class _Side(Struct, frozen=True, eq=False):
    """Locations of the joined rows in one side's tensors."""

    run: Run
    rank: int
    dtype: np.dtype[Any]
    """Dtype of the compared values; for complex numbers, the dtype of their parts."""
    nbytes: list[int]
    """Number of bytes of each firing."""
    width: int
    counts: tuple[int, ...]
    """Number of rows of each join."""
    firing: Array
    """[rows]: firing of each row."""
    element: Array
    """[rows]: first element of each row within its firing."""


class BatchedPairs(Struct, frozen=True, eq=False):
    """The common reading plan of all pairs with one shape key."""

    sides: tuple[_Side, _Side]
    parts: tuple[ReadJoin, ...]
    joined: Array
    """[2, joins]: firing indices of baseline and target."""
    excused: Array
    """[2, joins]: the columns of :attr:`joined` for joins that need not be read if their hashes are equal."""
    num_elements: int
    """Number of elements of the joined rows, without padding."""

    @property
    def num_rows(self) -> int:
        """Number of rows of one pair."""
        return len(self.sides[0].firing)

    @property
    def rank(self) -> int:
        """Rank of the target."""
        return self.sides[1].rank

    @property
    def width(self) -> int:
        """Number of columns of a row; a complex number counts as two."""
        return self.sides[0].width

    def reading(self, pair: Pair) -> "Reading | None":
        """Return how much of a pair with this shape key must be read: all of it, or nothing.

        Returns None if only a part must be read, or if values are not stored: the pair cannot be batched.
        """
        baseline, target = pair.sides
        num_equal = _num_equal(baseline, target, self.excused, "hashes")
        if num_equal:
            return "nothing" if num_equal == len(self.parts) else None
        return "all" if baseline.is_stored and target.is_stored else None

    def has_equal_bags(self, pair: Pair) -> bool:
        """Return whether matched firings may contain the same elements in another order."""
        return _num_equal(*pair.sides, self.joined, "bags") > 0

    def rows_of(self, one: Series, side: int, join: Array, index: Array) -> Array | None:
        """Read some rows of one side of a pair with this shape key, [rows, width].

        The rows are given by ``join`` and ``index`` within the join. Returns None if values are not stored, or not at
        the expected offsets.
        """
        stored = _rows(self.sides[side], [one]) if one.is_stored else None
        if stored is None:
            return None
        at = np.array([part.first for part in self.parts])[join] + index
        values = np.empty((len(at), self.width), self.sides[side].dtype)
        for number, rows in enumerate(stored.files):
            here = stored.file[at] == number
            values[here] = rows[stored.first[at[here]]]
        return values

    def stored_rows(self, pairs: Sequence[Pair]) -> "StoredRows | None":
        """Locate the rows of pairs that are read as a whole, see :meth:`reading`.

        Returns None if bytes are not at the expected offsets; each pair then reports this itself.
        """
        series = zip(*((p.baseline, p.target) for p in pairs), strict=True)
        rows = [_rows(side, [one for one in mine if one]) for side, mine in zip(self.sides, series, strict=True)]
        left, right = rows
        return None if left is None or right is None else StoredRows(left, right)


class StoredRows:
    """Locations of the stored rows of a batch of pairs, in the order of the pairs."""

    def __init__(self, left: "_Rows", right: "_Rows") -> None:
        self._left, self._right = left, right
        self._files = left.file * len(right.files) + right.file
        """[rows]: index of the pair of files."""

    def by_files(self) -> tuple[list[Strip], Array | None]:
        """Return one block per pair of files, and the index of each row, or None if the rows are in order."""
        if len(self._left.files) == len(self._right.files) == 1:
            return [self._strip(np.s_[:])], None
        places = [np.flatnonzero(self._files == key) for key in np.unique(self._files)]
        return [self._strip(at) for at in places], np.concatenate(places)

    def in_order(self, rows: Array) -> Iterator[Strip]:
        """Yield the given rows in order, one block per consecutive run of rows in the same files."""
        files = self._files[rows]
        cuts = [0, *(np.flatnonzero(files[1:] != files[:-1]) + 1).tolist(), len(rows)]
        for start, end in pairwise(cuts if len(rows) else ()):
            yield self._strip(rows[start:end])._replace(row=start)

    def _strip(self, rows: Any) -> Strip:
        left, right = self._left, self._right
        first, second = left.first[rows], right.first[rows]
        one, two = divmod(int(self._files[rows][0]), len(right.files))
        return Strip(left.files[one], right.files[two], first, second)


def _num_equal(left: Series, right: Series, joined: Array, what: Literal["hashes", "bags"]) -> int:
    """Return the number of matched firings, given as [2, joins], with equal hashes or multiset hashes."""
    if not joined.size:
        return 0
    one, two = left.digest_words(what), right.digest_words(what)
    if one is not None and two is not None:
        return int((one[joined[0]] == two[joined[1]]).all(1).sum())
    ours, theirs = getattr(left, what), getattr(right, what)
    known = [(a, b) for i, j in joined.T.tolist() if (a := ours[i]) is not None and (b := theirs[j]) is not None]
    return sum(a == b if what == "hashes" else int(a, 16) == int(b, 16) for a, b in known)


def batched_pairs_of(ready: PreparedPair) -> BatchedPairs | None:
    """Return the common reading plan of all pairs with this shape key; None if they must be read one by one."""
    joins, sides = ready.plan.joins, []
    for which, wholes in enumerate((ready.left, ready.right)):
        picked = [(j.target, j.target_rows) if which else (j.baseline, j.baseline_rows) for j in joins]
        if (side := _side(wholes, ready.layouts[which], picked)) is None:
            return None
        sides.append(side)
    left, right = sides
    if left.width != right.width or left.counts != right.counts or not sum(left.counts):
        return None
    parts = tuple(map(ReadJoin, joins, accumulate(left.counts, initial=0), left.counts))
    joined = np.array([(j.baseline, j.target) for j in joins], np.int64).T
    excused = [ready.may_be_equal(j) and ready.left[j.baseline].shape == ready.right[j.target].shape for j in joins]
    num_elements = sum(num_elements_of(ready.left[join.baseline], ready.layouts[0], join) for join in joins)
    return BatchedPairs((left, right), parts, joined, joined[:, excused], num_elements)


def num_elements_of(whole: AssembledTensor, layout: Layout, join: RowJoin) -> int:
    """Return the number of elements of the joined rows, without padding."""
    if join.pairs is None:
        return math.prod(whole.shape)
    return len(join.pairs) * math.prod(n for axis, n in enumerate(whole.shape) if axis not in layout.axes)


def _side(wholes: Sequence[AssembledTensor], layout: Layout, picked: Sequence[tuple[int, Rows]]) -> _Side | None:
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


class _Rows(NamedTuple):
    """The rows of several pairs' tensors within their files."""

    files: list[Array]
    """For each file, an array of all overlapping rows that start at any element."""
    file: Array
    """[rows]: index of the file."""
    first: Array
    """[rows]: index of the row in the array of that file."""


def _rows(side: _Side, series: Sequence[Series]) -> _Rows | None:
    (file, offset, nbytes), size, num = spans_of(series), side.dtype.itemsize, len(side.nbytes)
    if nbytes.tolist() != side.nbytes * len(series):
        return None
    try:
        if side.run.file(series[0].firings[0].records[0], 0) is None:
            buffers, file, offset = [_gathered(side, series)], np.zeros_like(file), np.cumsum(nbytes) - nbytes
            if buffers[0].nbytes != nbytes.sum():
                return None
        else:
            ends = offset + nbytes
            if min(offset.min(), ends.min()) < 0 or (offset % size).any():
                return None
            names = np.flatnonzero(np.bincount(file))  # np.unique would hash each
            file = np.searchsorted(names, file)
            of_each = [np.flatnonzero(file == i) for i in range(len(names))]
            last = [at[ends[at].argmax()].item() for at in of_each]  # the record that ends last
            data = [side.run.file(series[i // num].firings[i % num].records[0], ends.item(i)) for i in last]
            buffers = [one for one in data if one is not None]
            if len(buffers) < len(data):
                return None
    except DataError:
        return None
    files = [
        np.ndarray(((d.nbytes // size) - side.width + 1, side.width), side.dtype, d, 0, (size, size)) for d in buffers
    ]
    first = (offset // size).reshape(len(series), -1)[:, side.firing] + side.element
    return _Rows(files, file.reshape(len(series), -1)[:, side.firing].reshape(-1), first.reshape(-1))


def _gathered(side: _Side, series: Sequence[Series]) -> Array:
    """Copy payloads that are not stored contiguously into one buffer; empty if a dtype is not the recorded one.

    Raises DataError if values cannot be read.
    """
    values = [side.run.array(firing.records[0]) for one in series for firing in one.firings]
    if any(array.dtype != side.dtype and array.real.dtype != side.dtype for array in values):
        return np.empty(0, np.uint8)
    return np.frombuffer(b"".join([array.tobytes() for array in values]), np.uint8)
