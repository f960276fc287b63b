"""Sample: paired rows of one site in both runs, on which hypotheses are tested."""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from msgspec import Struct

from tapscope.comparator.alignment.align import JoinPlan
from tapscope.comparator.alignment.layout import Layout
from tapscope.comparator.alignment.prepare import PairPreparer, PreparedPair
from tapscope.comparator.alignment.row_join import RowJoin
from tapscope.comparator.alignment.row_map import RowMap
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.assembly.blocks import Block, Rows, blocks, row_axes
from tapscope.comparator.assembly.pieces import Piece
from tapscope.comparator.facts import Place
from tapscope.comparator.matching.match import Pair
from tapscope.comparator.metrics.batched_pairs import BatchedPairs
from tapscope.comparator.metrics.measure import batched_form
from tapscope.run_format.run import Run

Array = np.ndarray[Any, Any]

MAX_VALUES = 1 << 18
"""Maximum number of values of either side in a sample."""
MAX_ROWS = 384
MAX_WIDTH = 1 << 15
"""Maximum number of columns in a sample; wider rows are cut around the worst column."""
MIN_ROWS = 8


@dataclass(frozen=True)
class Sample:
    """A selection of paired rows of one site; non-finite values are kept."""

    baseline: Array
    """[rows, columns] float64."""
    target: Array
    request: Array
    """[rows] index of the request; -1 without token rows."""
    position: Array
    """[rows] position in the request; the index of the row without token rows."""
    step: Array
    """[rows] target step."""
    first_column: int
    width: int
    """Number of columns of the site, which exceeds that of the sample if rows are wide."""
    num_rows: int
    """Number of paired rows of the site, which exceeds that of the sample if there are many."""
    ranks: Array
    """[columns] target rank that holds the column; -1 if several ranks do."""
    dtypes: tuple[str, str]
    is_integer: bool
    site: str = ""
    """Name of the site in the baseline."""

    @cached_property
    def size(self) -> Array:
        """[rows, 1] norm of the baseline row, but at least a quarter of the median norm."""
        norms = np.sqrt(np.nansum(np.where(np.isfinite(self.baseline), self.baseline, 0.0) ** 2, axis=1, keepdims=True))
        typical = float(np.median(norms)) if len(norms) else 0.0
        sizes: Array = np.maximum(norms, 0.25 * typical if typical > 0.0 else 1.0)
        return sizes


class Choice(Struct, frozen=True):
    """The selected rows of a sample as (join, index within the join), and its columns."""

    join: Array
    index: Array
    first_column: int
    num_columns: int
    num_rows: int


def take(ready: PreparedPair, row_map: RowMap, worst: Place | None, *, is_integer: bool) -> Sample:
    """Return a sample of rows around the worst one and of evenly spaced others; a huge tensor is never read
    completely."""
    choice = _choose(ready, row_map, worst)
    sides = _read(ready, choice, 0), _read(ready, choice, 1)
    request, position, step = _places(ready, row_map, choice)
    join = ready.plan.joins[int(choice.join[0])]
    whole = ready.right[join.target]
    names = str(ready.left[join.baseline].dtype), str(whole.dtype)
    ranks = _ranks_of(ready, choice)[choice.first_column : choice.first_column + choice.num_columns]
    width = _width(whole, ready.layouts[1])
    return Sample(
        *sides, request, position, step, choice.first_column, width, choice.num_rows, ranks, names, is_integer
    )


def has_one_width(ready: PreparedPair) -> bool:
    """Return whether rows of all firings have equal width; rows of masks and scores grow with the number of keys."""
    sides = ((ready.left, ready.layouts[0]), (ready.right, ready.layouts[1]))
    return all(
        len({_width(wholes[join.target if side else join.baseline], layout) for join in ready.plan.joins}) <= 1
        for side, (wholes, layout) in enumerate(sides)
    )


class BaselineRows:
    """Reads the rows of a sample from the baseline of other sites; lookups common to several sites are cached."""

    def __init__(self, sample: Sample, preparer: PairPreparer) -> None:
        self._sample, self._preparer = sample, preparer
        self._choices: dict[int, tuple[JoinPlan, Choice | None]] = {}
        """id of a plan (shared by sites with the same rows) -> the plan, and the selected rows."""
        self._batched: dict[Hashable, BatchedPairs | None] = {}
        """Shape key -> how to read pairs with this key in a batch."""

    def of(self, pair: Pair) -> Array | None:
        """Return the sample's rows of another site as [rows, columns]; None if a row is missing or the width differs.

        Raises DataError.
        """
        ready = self._preparer.prepare(pair)
        if not ready.plan.joins or self._sample.width != self._sample.baseline.shape[1]:
            return None
        _, choice = self._choices.get(id(ready.plan)) or self._choices.setdefault(
            id(ready.plan), (ready.plan, self._choice(ready))
        )
        whole = ready.left[ready.plan.joins[0].baseline]
        if choice is None or _width(whole, ready.layouts[0]) != self._sample.width:
            return None
        alike = self._alike(pair)
        rows = alike.rows_of(pair.baseline, 0, choice.join, choice.index) if alike and pair.baseline else None
        return _read(ready, choice, 0) if rows is None else rows.astype(np.float64)

    def _choice(self, ready: PreparedPair) -> Choice | None:
        sample, known = self._sample, _RowIndex(ready, self._preparer.row_map)
        places_of_rows = [
            known.find(*place) for place in zip(sample.request, sample.position, sample.step, strict=True)
        ]
        places = [place for place in places_of_rows if place is not None]
        if len(places) < len(places_of_rows):
            return None
        joins, index = (np.array(column) for column in zip(*places, strict=True))
        return Choice(joins, index, 0, sample.width, len(joins))

    def _alike(self, pair: Pair) -> BatchedPairs | None:
        """Return how to read pairs with this shape key in a batch; None if each pair is read individually."""
        form = self._preparer.shape_key(pair)
        template = self._preparer.template(form)
        if template is not None and form not in self._batched:
            self._batched[form] = batched_form(template)
        return self._batched.get(form)


def read_parts(
    sample: Sample, ready: PreparedPair, row_map: RowMap, part_of: Callable[[AssembledTensor], Piece | None]
) -> Array | None:
    """Return the sample's rows of a part of the target's firings, such as one rank's partial sum; None if any row is
    missing."""
    if not ready.plan.joins or sample.width != sample.baseline.shape[1]:
        return None
    known = _RowIndex(ready, row_map)
    places = [known.find(*place) for place in zip(sample.request, sample.position, sample.step, strict=True)]
    values = np.full(sample.target.shape, np.nan)
    for number in {place[0] for place in places if place is not None}:
        join = ready.plan.joins[number]
        whole = ready.right[join.target]
        piece = part_of(whole)
        if piece is None or piece.shape != whole.shape:
            return None
        at = [i for i, place in enumerate(places) if place is not None and place[0] == number]
        index = np.array([place[1] for i in at if (place := places[i]) is not None])
        values[at] = rows_of(piece, whole.run, ready.layouts[1].axes, _index(join.target_rows, index))
    return None if None in places else values


class _RowIndex:
    """Index of the paired rows of a site by (request, position, step)."""

    def __init__(self, ready: PreparedPair, row_map: RowMap) -> None:
        counts = np.array([_num_rows(ready, join) for join in ready.plan.joins])
        join = np.repeat(np.arange(len(counts)), counts)
        index = np.arange(len(join)) - np.repeat(np.cumsum(counts) - counts, counts)
        places = _places(ready, row_map, Choice(join, index, 0, 1, len(join)))
        rows = zip(*(column.tolist() for column in places), strict=True)
        self._at = dict(zip(rows, zip(join.tolist(), index.tolist(), strict=True), strict=True))

    def find(self, request: Any, position: Any, step: Any) -> tuple[int, int] | None:
        return self._at.get((int(request), int(position), int(step)))


def _choose(ready: PreparedPair, row_map: RowMap, worst: Place | None) -> Choice:
    joins = ready.plan.joins
    counts = np.array([_num_rows(ready, join) for join in joins])
    total, width = int(counts.sum()), _width(ready.right[joins[0].target], ready.layouts[1])
    columns = min(width, MAX_WIDTH)
    at = worst.index[-1] if worst is not None and worst.index else 0
    first = min(max(at - columns // 2, 0), width - columns)
    limit = min(max(MAX_VALUES // max(columns, 1), MIN_ROWS), MAX_ROWS)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    if total <= limit:
        rows = np.arange(total)
    else:
        centre = _find(ready, row_map, worst, starts)
        near = np.arange(max(centre - limit // 4, 0), min(centre + limit // 4, total))
        rows = np.union1d(near, np.linspace(0, total - 1, limit // 2).astype(np.int64))
    join = np.searchsorted(starts, rows, side="right") - 1
    return Choice(join, rows - starts[join], first, columns, total)


def _find(ready: PreparedPair, row_map: RowMap, worst: Place | None, starts: Array) -> int:
    """Return the index of the worst row among all paired rows; 0 if unknown."""
    if worst is None:
        return 0
    for i, join in enumerate(ready.plan.joins):
        if ready.right[join.target].records[0].key.step != worst.step:
            continue
        if join.pairs is None:
            at = worst.index[0] if len(worst.index) > 1 else 0
            picked = join.target_rows
            return int(starts[i]) + (at if isinstance(picked, slice) else int(np.searchsorted(picked, at)))
        columns = row_map.pair_position, row_map.pair_visit, row_map.pair_branch
        keys = worst.position, worst.visit, worst.branch
        here = np.all([column[join.pairs] == key for column, key in zip(columns, keys, strict=True)], axis=0)
        names = np.array(row_map.requests, dtype=object)[row_map.pair_request[join.pairs]]
        matches = np.flatnonzero(here & (names == worst.request))
        if len(matches):
            return int(starts[i] + matches[0])
    return 0


def _num_rows(ready: PreparedPair, join: RowJoin) -> int:
    if join.pairs is not None:
        return len(join.pairs)
    if not isinstance(join.target_rows, slice):
        return len(join.target_rows)
    shape = ready.right[join.target].shape
    return math.prod([shape[axis] for axis in ready.layouts[1].axes or row_axes(shape)])


def _width(whole: AssembledTensor, layout: Layout) -> int:
    return sum(block.width for block in _blocks(whole, layout))


def _blocks(whole: AssembledTensor, layout: Layout) -> list[Block]:
    assert whole.piece is not None
    return blocks(whole.piece, whole.run, layout.axes)


def _read(ready: PreparedPair, choice: Choice, side: int) -> Array:
    parts = []
    for number in np.unique(choice.join):
        join, rows = ready.plan.joins[int(number)], choice.index[choice.join == number]
        whole = ready.left[join.baseline] if side == 0 else ready.right[join.target]
        picked = join.baseline_rows if side == 0 else join.target_rows
        values = rows_of(whole.piece, whole.run, ready.layouts[side].axes, _index(picked, rows))
        parts.append(values[:, choice.first_column : choice.first_column + choice.num_columns])
    return np.concatenate(parts).astype(np.float64)


def _index(picked: Rows, rows: Array) -> Array:
    return rows + (picked.start or 0) if isinstance(picked, slice) else np.asarray(picked)[rows]


def rows_of(piece: Piece | None, run: Run, axes: tuple[int, ...], rows: Array) -> Array:
    """Return the given rows of a tensor as [rows, width], in its own dtype."""
    assert piece is not None
    return np.concatenate([np.asarray(block.rows(rows)) for block in blocks(piece, run, axes)], axis=1)


def _ranks_of(ready: PreparedPair, choice: Choice) -> Array:
    """Return the rank that holds each column in all chosen rows; -1 if several do.

    Data-parallel ranks hold different requests.
    """
    firings = {ready.plan.joins[int(number)].target for number in np.unique(choice.join)}
    ranks = [_ranks(ready.right[firing], ready.layouts[1]) for firing in firings]
    known = ranks[0].copy()
    for other in ranks[1:]:
        same = len(other) == len(known) and other == known
        known = np.where(same, known, -1)
    return known


def _ranks(whole: AssembledTensor, layout: Layout) -> Array:
    parts = _blocks(whole, layout)
    lone = len(parts) == 1  # not sharded, or replicated
    return np.concatenate([np.full(b.width, -1 if lone or b.rank is None else b.rank) for b in parts])


def _places(ready: PreparedPair, row_map: RowMap, choice: Choice) -> tuple[Array, Array, Array]:
    """Return (request, position, target step) of the chosen rows."""
    joins, numbers = ready.plan.joins, np.unique(choice.join).tolist()
    steps = np.zeros(len(joins), np.int64)
    steps[numbers] = [ready.right[joins[number].target].records[0].key.step for number in numbers]
    request, position = np.full(len(choice.join), -1), choice.index.copy()
    for number in numbers:
        if (pairs := joins[number].pairs) is not None:
            here = choice.join == number
            pairs = pairs[choice.index[here]]
            request[here], position[here] = row_map.pair_request[pairs], row_map.pair_position[pairs]
    return request, position, steps[choice.join]
