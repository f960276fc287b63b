"""Measure: how far the joined rows of sites are apart, row by row, in one pass over the bytes of both sides."""

import math
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from tapscope.comparator.alignment.layout import Layout, is_mask
from tapscope.comparator.alignment.prepare import PreparedPair
from tapscope.comparator.alignment.row_join import RowJoin
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.metrics.batched_pairs import BatchedPairs, batched_pairs_of
from tapscope.comparator.metrics.joined_rows import JoinedRows, ReadJoin, part_at
from tapscope.comparator.metrics.lazy_pair import LazyPair
from tapscope.core import dtypes
from tapscope.core.errors import DataError
from tapscope.kernels.native import Compared, Measure, RowMeasures, overviews

Array = np.ndarray[Any, Any]


class WidthError(Exception):
    """Rows that were to be compared have different widths; the text gives both shapes."""


class MeasuredPair(Struct, frozen=True):
    """All joined rows of a site; arrays have one element a row, in one order."""

    rows: RowMeasures
    at_worst: Array
    """Baseline value where the row's largest difference is (float64)."""
    strip: Array
    """Index in :attr:`ranks` of the columns that hold the largest difference."""
    ranks: tuple[int | None, ...]
    """Rank that alone holds the target's columns, strip by strip, of all pairs that were measured together."""
    parts: tuple[ReadJoin, ...] = ()
    num_hashed: int = 0
    """Elements that were not read because equal hashes already say they are equal."""
    width: int = 0
    """Elements of the widest row."""

    @property
    def total(self) -> Measure:
        """Global numbers over the rows that were read."""
        return self.rows.total()

    @property
    def pairs(self) -> Array:
        """Row pair of each row; -1 when compared whole."""
        found = [np.full(p.num_rows, -1, np.int64) if p.join.pairs is None else p.join.pairs for p in self.parts]
        return np.concatenate([np.empty(0, np.int64), *found])

    @property
    def baseline_firing(self) -> Array:
        """Index of the firing of each row."""
        return self._each([part.join.baseline for part in self.parts])

    @property
    def target_firing(self) -> Array:
        """See :attr:`baseline_firing`."""
        return self._each([part.join.target for part in self.parts])

    def _each(self, values: list[int]) -> Array:
        return np.repeat(np.array(values, np.int64), [part.num_rows for part in self.parts])

    def part_at(self, row: int) -> ReadJoin:
        """The part that a row belongs to."""
        return part_at(self.parts, row)


class _Begun(NamedTuple):
    """The joins of a pair that are read."""

    parts: tuple[ReadJoin, ...]
    num_hashed: int
    """Elements of the others."""
    width: int
    """Of the widest row."""


class MeasuredBatch:
    """Pairs that were measured together. What native code found of their rows is in sections, one a pair."""

    def __init__(
        self,
        compared: Compared,
        ranks: Sequence[int | None],
        sections: Sequence[tuple[int, _Begun | WidthError | DataError]],
        bounds: Sequence[int],
    ) -> None:
        """``sections`` are (place of the pair, what became of it), ``bounds`` where they begin and the last ends."""
        self._compared, self.ranks, self._bounds = compared, tuple(ranks), bounds
        self._begun = [begun for _, begun in sections]
        self.section = [0] * len(sections)
        """Of each pair."""
        for section, (place, _) in enumerate(sections):
            self.section[place] = section
        self.seen = overviews(compared.rows, compared.at_worst, bounds)

        self.num_hashed = [0 if isinstance(begun, Exception) else begun.num_hashed for begun in self._begun]
        """Elements of each section that equal hashes spared."""
        self.widths = [0 if isinstance(begun, Exception) else begun.width for begun in self._begun]
        """Of the widest row of each."""

    def problem(self, section: int) -> WidthError | DataError | None:
        """What was raised of a pair."""
        begun = self._begun[section]
        return begun if isinstance(begun, Exception) else None

    def begun(self, section: int) -> _Begun:
        """Of a pair of which nothing was."""
        begun = self._begun[section]
        assert not isinstance(begun, Exception)
        return begun

    def num_rows(self, section: int) -> int:
        """Rows that were read."""
        return self._bounds[section + 1] - self._bounds[section]

    def __getitem__(self, section: int) -> MeasuredPair:
        rows, at_worst, strip = self._compared
        here = slice(self._bounds[section], self._bounds[section + 1])
        return MeasuredPair(rows[here], at_worst[here], strip[here], self.ranks, *self.begun(section))

    def at_worst(self) -> tuple[list[int], list[int | None], list[int]]:
        """(column, rank, mismatches of non-finite values) of the row of each section that is furthest off."""
        rows, _, strip = self._compared
        last = max(len(strip) - 1, 0)
        at = np.minimum(np.array(self._bounds[:-1]) + self.seen.columns["worst"], last)
        if not len(strip):
            return [-1] * len(at), [None] * len(at), [0] * len(at)
        ranks = [self.ranks[i] for i in strip[at].tolist()]
        return rows.argmax[at].tolist(), ranks, rows.nonfinite_mismatch[at].tolist()


def measure(opened: LazyPair, tolerance: tuple[float, float] = (0.0, 0.0)) -> MeasuredPair:
    """Compare every join. ``tolerance`` is (atol, rtol), counted in :attr:`RowMeasures.over`.

    Raises WidthError when rows do not have one width, RunCorruptError when bytes are missing.
    """
    found = measure_all([opened], tolerance)
    if (problem := found.problem(0)) is not None:
        raise problem
    return found[0]


def measure_all(pairs: Sequence[LazyPair], tolerance: tuple[float, float] = (0.0, 0.0)) -> MeasuredBatch:
    """The same of several pairs at once, in one native call where bytes lie in place."""
    joined = JoinedRows(tolerance)
    sections: list[tuple[int, _Begun | WidthError | DataError]] = []
    bounds = [0]
    for alike, group in _gathered(pairs):
        found = None if alike is None else alike.strips([pair for i in group if (pair := pairs[i].pair)])
        if alike is not None and found is not None:
            joined.add_strips(*found, alike.rank)
            bounds += range(bounds[-1] + alike.num_rows, joined.num_rows + 1, alike.num_rows)
            sections += zip(group, repeat(_Begun(alike.parts, 0, alike.width)))
            continue
        for i in group:
            sections.append((i, _begin(pairs[i], joined)))
            bounds.append(joined.num_rows)
    return MeasuredBatch(joined.compared(), joined.ranks, sections, bounds)


def _gathered(pairs: Sequence[LazyPair]) -> Iterator[tuple[BatchedPairs | None, list[int]]]:
    """(what they have in common, places of the pairs), those together that may be one strip."""
    groups: dict[object, list[int]] = {}
    for i, one in enumerate(pairs):
        groups.setdefault((i, 0) if one.alike is None else (0, id(one.alike)), []).append(i)
    for group in groups.values():
        yield pairs[group[0]].alike, group


def _begin(opened: LazyPair, joined: JoinedRows) -> _Begun | WidthError | DataError:
    try:
        return _join(opened, joined)
    except (WidthError, DataError) as error:
        return error


def batched_form(ready: PreparedPair) -> BatchedPairs | None:
    """What pairs like this one have in common by which they are read together; None where each is read alone."""
    try:
        for join in ready.plan.joins:
            _check_width(ready.left[join.baseline], ready.right[join.target], ready.layouts)
    except WidthError:
        return None
    return None if _has_masks(ready) else batched_pairs_of(ready)


def _has_masks(ready: PreparedPair) -> bool:
    """Whether places are let through or hidden: the most negative number that hides one is the dtype's own."""
    one, two = ready.left[0], ready.right[0]
    return are_masks(one.dtype, two.dtype) or (one.dtype != two.dtype and is_mask(one.records[0].key.site))


def _join(opened: LazyPair, joined: JoinedRows) -> _Begun:
    """The joins of a pair that have to be read; those that hashes call equal have not."""
    ready = opened.ready
    baseline, target, layouts = ready.left, ready.right, ready.layouts
    masks = _has_masks(ready)
    parts, hashed, width, first = list[ReadJoin](), 0, 0, joined.num_rows
    for join in ready.plan.joins:
        if ready.equal_by_hash(join):
            hashed += _num_elements(baseline[join.baseline], layouts[0], join)
            continue
        _check_width(baseline[join.baseline], target[join.target], layouts)
        start, left = joined.num_rows - first, opened.left[join.baseline]
        num_rows = joined.add(left, opened.right[join.target], join, masks=masks)
        parts.append(ReadJoin(join, start, num_rows))
        width = max(width, sum([block.width for block in left]) if num_rows else 0)
    return _Begun(tuple(parts), hashed, width)


def _num_elements(whole: AssembledTensor, layout: Layout, join: RowJoin) -> int:
    """Elements of the joined rows, padding left out."""
    if join.pairs is None:
        return math.prod(whole.shape)
    return len(join.pairs) * math.prod(n for axis, n in enumerate(whole.shape) if axis not in layout.axes)


def are_masks(baseline: str | None, target: str | None) -> bool:
    """Whether one side is boolean and the other a float: an attention mask, once as flags and once to be added."""
    return (baseline == "bool" and dtypes.is_float(target)) or (target == "bool" and dtypes.is_float(baseline))


def _check_width(one: AssembledTensor, two: AssembledTensor, layouts: tuple[Layout, Layout]) -> None:
    if one.shape == two.shape and layouts[0] == layouts[1]:
        return
    rests = [
        [n for i, n in enumerate(w.shape) if i not in layout.axes]
        for w, layout in zip((one, two), layouts, strict=True)
    ]
    if layouts[0].by_rows:
        fits = math.prod(rests[0]) == math.prod(rests[1])
    else:
        fits = [n for n in rests[0] if n != 1] == [n for n in rests[1] if n != 1]
    if not fits:
        raise WidthError(f"shapes {tuple(one.shape)} and {tuple(two.shape)} differ beyond the token rows")
