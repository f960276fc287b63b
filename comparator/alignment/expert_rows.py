"""Expert rows: match rows ordered by a router's choice if token and expert are the same in both runs.

The layout of each run is inferred from a sample of rows: the pair of known layouts under which matched rows are most
similar. An unstable sort leaves the rows within an expert, padding included, in arbitrary order. If that shows as
outlier rows, the pairing is unknown, unless both runs made the same choice without padding. Row i then matches row i
unless it is far more similar to another row. The same check applies to rows matched by a layout: where all rows share a
few huge channels, unrelated rows are similar too.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from tapscope.comparator.alignment.align import JoinPlan
from tapscope.comparator.alignment.expert_entries import ExpertEntries, place_of
from tapscope.comparator.alignment.layout import Layout
from tapscope.comparator.alignment.row_join import counts_of, join_rows, matching_keys
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.assembly.blocks import blocks

Array = np.ndarray[Any, Any]
LAYOUT = Layout((0,), "inferred")
_Sides = tuple[Sequence[AssembledTensor], Sequence[AssembledTensor]]
_MAX_ROWS, _MAX_COLUMNS, _MAX_ODD, _MAX_SEARCHED = 256, 256, 32, 1024
"""Sample sizes for layout inference: rows, columns, outlier rows to search for elsewhere, and rows searched for each
outlier."""
_MAX_ROW_DISTANCE = 0.25
"""L1 norm of the difference of two rows, relative to the sum of their L1 norms, above which the rows are unrelated (or
grossly wrong). Unrelated rows give 0.6 and more."""
_MIN_SIMILAR_ROWS = 0.9
"""Fraction of rows that must be similar for a layout to be accepted."""
_MIN_MISMATCH, _MISMATCH_RATIO = 1e-5, 4.0
"""A row distance above the first value, and above the second times the distance of other rows, is more than
rounding."""
_IN_EXPERT_ORDER = "rows in the order of an expert choice"
_NO_CHOICE = f"{_IN_EXPERT_ORDER}, which one run did not record"
OTHER_RANKS = "rows of experts that are on other ranks in one of the runs"
"""Reason for excluding a site whose expert rows are distributed differently over the ranks."""
_NO_VALUES = f"{_IN_EXPERT_ORDER}: their pairing cannot be determined without values"
_NO_ORDER = f"{_IN_EXPERT_ORDER}, with an unknown order within each expert"
_FROM_COUNTS = "numbers of rows, padding included, that follow from the recorded choice of experts"
_NO_TOKEN = "rows of an expert that no token went to in both runs"


def plan_experts(
    entries: tuple[ExpertEntries | None, ExpertEntries | None], wholes: _Sides, num_pairs: int
) -> JoinPlan | None:
    """Pair the rows of a site by token and expert.

    Returns None if no router choice orders the rows in either run, or if the only choice that does is a routing map of
    one run. Raises DataError if values cannot be read.
    """
    left, right = entries
    if left is None or right is None:
        only = left or right
        return None if only is None or only.is_known else JoinPlan(exclusion_reason=_NO_CHOICE)
    if _are_on_other_ranks(wholes[0][0], wholes[1][0]):
        return JoinPlan(exclusion_reason=OTHER_RANKS)
    has_values = all(whole.has_values for side in wholes for whole in side)
    is_known = left.is_known and right.is_known
    layouts = _MatchedRows((left, right), wholes).layouts() if has_values and not is_known else (0, 0)
    if layouts is None:
        return JoinPlan(exclusion_reason=_NO_ORDER)
    one, two = left.rowed(layouts[0]), right.rowed(layouts[1])
    joins = join_rows(one, two, num_pairs)
    if is_known and not joins:
        return JoinPlan(exclusion_reason=_NO_TOKEN)
    if not has_values and not all(join.aligned for join in joins):
        return JoinPlan(exclusion_reason=_NO_VALUES)
    counts = counts_of(one, two, joins)
    note = (
        f"{counts.num_absent:,} rows of experts that only one run chose are not compared" if counts.num_absent else ""
    )
    return JoinPlan(tuple(joins), counts, note=note)


def plan_counts(counts: tuple[Array | None, Array | None]) -> JoinPlan | None:
    """Return a plan that excludes per-expert row counts that differ; None if they are equal or are not per-expert
    counts.

    The counts follow from the routing maps, which are themselves compared without padding.
    """
    left, right = counts
    if left is None or right is None or np.array_equal(left, right):
        return None
    return JoinPlan(exclusion_reason=_FROM_COUNTS)


def _are_on_other_ranks(one: AssembledTensor, other: AssembledTensor) -> bool:
    """Return whether one side's assembled shards are wider than the other side: each rank then starts with the rows of
    its own experts."""
    wide = max(one, other, key=lambda whole: whole.shape[1:])
    return one.shape[1:] != other.shape[1:] and len(wide.records) > 1


class _MatchedRows:
    """The entries that match between the sides, with access to the values of their rows under any layout."""

    def __init__(self, sides: tuple[ExpertEntries, ExpertEntries], wholes: _Sides) -> None:
        self._sides, self._wholes = sides, wholes
        known = [np.flatnonzero(side.keys >= 0) for side in sides]
        first, second = matching_keys(sides[0].keys[known[0]], sides[1].keys[known[1]])
        self._entries = known[0][first], known[1][second]
        self._some = np.unique(np.linspace(0, max(0, len(first) - 1), _MAX_ROWS).astype(np.int64))[: len(first)]

    def layouts(self) -> tuple[int, int] | None:
        """Return the pair of layouts under which matched rows are most similar, preferring equal layouts; None if
        undecidable."""
        if not len(self._some):
            return 0, 0
        values = [
            [self._values(i, layout, self._entries[i][self._some]) for layout in range(len(self._sides[i].at))]
            for i in (0, 1)
        ]
        pairs = sorted(product(range(len(values[0])), range(len(values[1]))), key=lambda pair: pair[0] != pair[1])
        distances = {pair: _row_distances(values[0][pair[0]], values[1][pair[1]]) for pair in pairs}
        best = min(pairs, key=lambda pair: float(distances[pair].sum()))
        if (distances[best] < _MAX_ROW_DISTANCE).mean() >= _MIN_SIMILAR_ROWS and (
            self._are_loops()
            or not (self._are_uneven(distances[best]) or self._are_elsewhere(distances[best], values[0][best[0]]))
        ):
            return best
        return (0, 0) if self._is_one_choice() and not self._are_moved(distances[0, 0]) else None

    def _are_loops(self) -> bool:
        """Return whether both sides have one call per expert: a loop over experts, which needs no sort."""
        return all(len({*map(place_of, side)}) < len(side) for side in self._wholes)

    def _is_one_choice(self) -> bool:
        """Return whether both runs have every entry at the same index, without padding."""
        left, right = self._sides
        is_whole = len(self._entries[0]) == len(left.keys)
        return is_whole and np.array_equal(left.keys, right.keys) and np.array_equal(left.firing, right.firing)

    def _are_uneven(self, distances: Array) -> bool:
        """Return whether some row distances far exceed the typical one, or belong to unrelated rows.

        With padding, the typical distance is the 25 % quantile instead of the 75 % one: rows of padding are in no
        particular order and may be similar to all others.
        """
        is_whole = len(self._entries[0]) == len(self._sides[0].keys)
        most = max(_MIN_MISMATCH, _MISMATCH_RATIO * float(np.quantile(distances, 0.75 if is_whole else 0.25)))
        return bool(distances.max() > min(most, _MAX_ROW_DISTANCE))

    def _are_moved(self, distances: Array) -> bool:
        """Return whether any row that differs from the row at its own index is far more similar to another row of its
        expert."""
        left, right = (side.experts for side in self._sides)
        for i in np.argsort(-distances)[:_MAX_ODD].tolist():
            if distances[i] < _MIN_MISMATCH:
                return False
            mine = self._entries[0][self._some[i : i + 1]]
            rows = self._values(1, 0, np.flatnonzero(right == left[mine]))
            if _row_distances(self._values(0, 0, mine), rows).min() < distances[i] / _MISMATCH_RATIO:
                return True
        return False

    def _are_elsewhere(self, distances: Array, rows: Array) -> bool:
        """Return whether any baseline row of ``rows`` that differs from its match is far more similar to another target
        row, which means that the layout is wrong."""
        outliers = [i for i in np.argsort(-distances)[:_MAX_ODD].tolist() if distances[i] >= _MIN_MISMATCH]
        if not outliers:
            return False
        num = len(self._sides[1].keys)
        others = self._values(1, 0, np.unique(np.linspace(0, num - 1, _MAX_SEARCHED).astype(np.int64)))
        return any(_row_distances(rows[i : i + 1], others).min() < distances[i] / _MISMATCH_RATIO for i in outliers)

    def _values(self, side: int, layout: int, which: Array) -> Array:
        """Return the values of the given entries' rows on one side as float64 [which, columns], cut to the leading
        columns."""
        entries, wholes = self._sides[side], self._wholes[side]
        at = entries.at[layout][which]
        firing, row = entries.firing[at], entries.row[at]
        gathered: Array | None = None
        for i in np.unique(firing).tolist():
            here, whole = np.flatnonzero(firing == i), wholes[i]
            assert whole.piece is not None  # plan_experts checked has_values
            parts = [block.rows(row[here]) for block in blocks(whole.piece, whole.run, LAYOUT.axes)]
            values = np.concatenate(parts, axis=1)[:, :_MAX_COLUMNS].astype(np.float64)
            gathered = np.zeros((len(row), values.shape[1])) if gathered is None else gathered
            gathered[here] = values
        assert gathered is not None
        return gathered


def _row_distances(one: Array, two: Array) -> Array:
    """Return the relative L1 distance of each row pair as [rows], clipped to 1 so that one damaged row decides
    nothing."""
    if one.shape[-1] != two.shape[-1]:
        return np.zeros(len(two))
    distances = np.abs(one - two).sum(-1) / (np.abs(one) + np.abs(two)).sum(-1)
    return np.where(distances <= 1.0, distances, np.where((one == two).all(-1), 0.0, 1.0))
