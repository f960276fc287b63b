"""Measure: compute the differences of the joined rows of sites, row by row, in one pass over the bytes of both
sides."""

import math
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from tapscope.comparator.alignment.layout import Layout, is_mask
from tapscope.comparator.alignment.prepare import PreparedPair
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.metrics.batched_pairs import BatchedPairs, StoredRows, batched_pairs_of, num_elements_of
from tapscope.comparator.metrics.joined_rows import JoinedRows, ReadJoin, part_at
from tapscope.comparator.metrics.lazy_pair import LazyPair
from tapscope.core import dtypes
from tapscope.core.errors import DataError
from tapscope.kernels.native import Compared, Measure, RowMeasures, overviews
from tapscope.kernels.native.measure import INTEGERS

Array = np.ndarray[Any, Any]


class WidthError(Exception):
    """Raised if rows to compare have different widths; the message contains both shapes."""


class MeasuredPair(Struct, frozen=True):
    """Measurements of all joined rows of a site; arrays have one element per row, in the same order."""

    rows: RowMeasures
    at_worst: Array
    """Baseline value at the row's largest difference (float64)."""
    row_block: Array
    """Index into :attr:`ranks` of the row block with the largest difference."""
    ranks: tuple[int | None, ...]
    """For each row block of all pairs of the batch, the rank that alone holds the target's columns, or None."""
    parts: tuple[ReadJoin, ...] = ()
    num_hashed: int = 0
    """Number of elements that were not read because equal hashes show that they are equal."""
    width: int = 0
    """Number of elements of the widest row."""
    stored: tuple[StoredRows, int] | None = None
    """The stored rows of the batch, and the index of the pair's first row; None for a pair that is read by itself."""

    @property
    def total(self) -> Measure:
        """Global metrics over the rows that were read."""
        return self.rows.total()

    @property
    def pairs(self) -> Array:
        """Row pair of each row; -1 for rows of tensors compared as a whole."""
        pairs = [np.full(p.num_rows, -1, np.int64) if p.join.pairs is None else p.join.pairs for p in self.parts]
        return np.concatenate([np.empty(0, np.int64), *pairs])

    @property
    def target_firing(self) -> Array:
        """Index of the target firing of each row."""
        firings = np.array([part.join.target for part in self.parts], np.int64)
        return np.repeat(firings, [part.num_rows for part in self.parts])

    def part_at(self, row: int) -> ReadJoin:
        """Return the join that contains a row."""
        return part_at(self.parts, row)


class _JoinsToRead(NamedTuple):
    """The joins of a pair that are read, with the counts of the others."""

    parts: tuple[ReadJoin, ...]
    num_hashed: int
    """Number of elements of the other joins."""
    width: int
    """Number of elements of the widest row."""
    stored: tuple[StoredRows, int] | None = None
    """See :attr:`MeasuredPair.stored`."""


class MeasuredBatch:
    """Pairs that were measured together; the results of the native code consist of one section per pair."""

    def __init__(
        self,
        compared: Compared,
        ranks: Sequence[int | None],
        sections: Sequence[tuple[int, _JoinsToRead | WidthError | DataError]],
        bounds: Sequence[int],
    ) -> None:
        """Initialize from the native results.

        ``sections`` contains (index of the pair, its state); ``bounds`` contains the first row of each section and the
        end of the last one.
        """
        self._compared, self.ranks, self._bounds = compared, tuple(ranks), bounds
        self._sections = [state for _, state in sections]
        self.section = [0] * len(sections)
        """Section of each pair."""
        for section, (place, _) in enumerate(sections):
            self.section[place] = section
        self.overviews = overviews(compared.rows, compared.at_worst, bounds)

        self.num_hashed = [0 if isinstance(state, Exception) else state.num_hashed for state in self._sections]
        """Number of elements of each section that were skipped because of equal hashes."""
        self.widths = [0 if isinstance(state, Exception) else state.width for state in self._sections]
        """Number of elements of the widest row of each section."""

    def problem(self, section: int) -> WidthError | DataError | None:
        """Return the error of a section's pair, or None."""
        state = self._sections[section]
        return state if isinstance(state, Exception) else None

    def section_of(self, section: int) -> _JoinsToRead:
        """Return the joins of a section's pair, which must not have an error."""
        state = self._sections[section]
        assert not isinstance(state, Exception)
        return state

    def num_rows(self, section: int) -> int:
        """Return the number of rows of a section that were read."""
        return self._bounds[section + 1] - self._bounds[section]

    @property
    def num_over(self) -> list[int]:
        """Number of elements beyond the tolerance in each section."""
        num_over: list[int] = self.overviews.columns["counts"][:, INTEGERS.index("over")].tolist()
        return num_over

    def __getitem__(self, section: int) -> MeasuredPair:
        rows, at_worst, strip = self._compared
        here = slice(self._bounds[section], self._bounds[section + 1])
        return MeasuredPair(rows[here], at_worst[here], strip[here], self.ranks, *self.section_of(section))

    def at_worst(self) -> tuple[list[int], list[int | None], list[int]]:
        """Return (columns, ranks, numbers of nonfinite mismatches) of the worst row of each section."""
        rows, _, strip = self._compared
        last = max(len(strip) - 1, 0)
        at = np.minimum(np.array(self._bounds[:-1]) + self.overviews.columns["worst"], last)
        if not len(strip):
            return [-1] * len(at), [None] * len(at), [0] * len(at)
        ranks = [self.ranks[i] for i in strip[at].tolist()]
        return rows.argmax[at].tolist(), ranks, rows.nonfinite_mismatch[at].tolist()


def measure(opened: LazyPair, tolerance: tuple[float, float] = (0.0, 0.0)) -> MeasuredPair:
    """Compare all joins of a pair.

    ``tolerance`` is (atol, rtol); elements beyond it are counted in :attr:`RowMeasures.over`. Raises WidthError if rows
    have different widths, and RunCorruptError if bytes are missing.
    """
    batch = measure_all([opened], tolerance)
    if (problem := batch.problem(0)) is not None:
        raise problem
    return batch[0]


def measure_all(pairs: Sequence[LazyPair], tolerance: tuple[float, float] = (0.0, 0.0)) -> MeasuredBatch:
    """Measure several pairs, in one native call if their bytes are stored in place."""
    joined = JoinedRows(tolerance)
    sections: list[tuple[int, _JoinsToRead | WidthError | DataError]] = []
    bounds = [0]
    for alike, group in _gathered(pairs):
        if alike is not None and pairs[group[0]].is_equal:
            bounds += [joined.num_rows] * len(group)
            sections += zip(group, repeat(_JoinsToRead((), alike.num_elements, 0)))
            continue
        stored = None if alike is None else alike.stored_rows([pair for i in group if (pair := pairs[i].pair)])
        if alike is not None and stored is not None:
            joined.add_row_blocks(*stored.by_files(), alike.rank)
            bounds += range(bounds[-1] + alike.num_rows, joined.num_rows + 1, alike.num_rows)
            firsts = range(0, len(group) * alike.num_rows, alike.num_rows)
            states = (_JoinsToRead(alike.parts, 0, alike.width, (stored, first)) for first in firsts)
            sections += zip(group, states, strict=True)
            continue
        for i in group:
            sections.append((i, _try_join(pairs[i], joined)))
            bounds.append(joined.num_rows)
    return MeasuredBatch(joined.compared(), joined.ranks, sections, bounds)


def _gathered(pairs: Sequence[LazyPair]) -> Iterator[tuple[BatchedPairs | None, list[int]]]:
    """Yield (common reading plan, indices of the pairs) for pairs that form one row block, or are all equal by hash."""
    groups: dict[object, list[int]] = {}
    for i, one in enumerate(pairs):
        groups.setdefault(i if one.batched is None else (id(one.batched), one.is_equal), []).append(i)
    for group in groups.values():
        yield pairs[group[0]].batched, group


def _try_join(opened: LazyPair, joined: JoinedRows) -> _JoinsToRead | WidthError | DataError:
    try:
        return _join(opened, joined)
    except (WidthError, DataError) as error:
        return error


def batched_form(ready: PreparedPair) -> BatchedPairs | None:
    """Return the reading plan of pairs with this shape key in a batch; None if each pair is read by itself."""
    try:
        for join in ready.plan.joins:
            _check_width(ready.left[join.baseline], ready.right[join.target], ready.layouts)
    except WidthError:
        return None
    return None if has_masks(ready) else batched_pairs_of(ready)


def has_masks(ready: PreparedPair) -> bool:
    """Return whether visibility is compared: the most negative number that hides a position depends on the dtype."""
    one, two = ready.left[0], ready.right[0]
    return are_masks(one.dtype, two.dtype) or (one.dtype != two.dtype and is_mask(one.records[0].key.site))


def _join(opened: LazyPair, joined: JoinedRows) -> _JoinsToRead:
    """Add the joins of a pair that must be read, those without equal hashes."""
    ready = opened.prepared
    baseline, target, layouts = ready.left, ready.right, ready.layouts
    masks = has_masks(ready)
    parts, hashed, width, first = list[ReadJoin](), 0, 0, joined.num_rows
    for join in ready.plan.joins:
        if ready.equal_by_hash(join):
            hashed += num_elements_of(baseline[join.baseline], layouts[0], join)
            continue
        _check_width(baseline[join.baseline], target[join.target], layouts)
        start, left = joined.num_rows - first, opened.left[join.baseline]
        num_rows = joined.add(left, opened.right[join.target], join, masks=masks)
        parts.append(ReadJoin(join, start, num_rows))
        width = max(width, sum([block.width for block in left]) if num_rows else 0)
    return _JoinsToRead(tuple(parts), hashed, width)


def are_masks(baseline: str | None, target: str | None) -> bool:
    """Return whether one side is boolean and the other floating-point: an attention mask as flags or as an additive
    term."""
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
