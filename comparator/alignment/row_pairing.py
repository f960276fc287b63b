"""Row pairing: match the rows of two runs in several passes, each row at most once."""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field

from tapscope.comparator.alignment.forks import Fork
from tapscope.comparator.alignment.request_history import NEVER, RequestHistory
from tapscope.comparator.alignment.requests import RequestPair
from tapscope.comparator.alignment.row_join import matching_keys
from tapscope.comparator.alignment.row_map import FORKED, PADDING, RECOMPUTED, REPLACED, UNALIGNED, RowMap
from tapscope.comparator.runs.grids import Grid, SideRows, StepRows
from tapscope.core.observe import DRAFT_PHASE

Array = np.ndarray[Any, Any]


class RowPairingSide:
    """The rows of one run during matching."""

    def __init__(self, rows: RequestHistory, shift_steps: int = 0) -> None:
        self.rows = rows
        self.pair = np.full(len(rows.requests), -1, np.int32)  # request -> index of its request pair
        self.position = rows.position  # in the baseline's numbering
        self.code = np.empty(0, np.int64)
        self.visit = np.maximum(rows.visit, rows.is_recomputed) if rows.is_recomputed.any() else rows.visit
        of_drafts = np.array([g.phase == DRAFT_PHASE for g in rows.grids], bool)
        self.is_draft = of_drafts[rows.grid] if of_drafts.any() else np.zeros(len(rows.grid), bool)
        self._steps = np.array([g.step - shift_steps for g in rows.grids], np.int64)

    def enter(self, requests: Sequence[tuple[int, int]], limits: Array, padding: Collection[int]) -> None:
        """Assign the request pairs, their forks and the padding to the rows.

        ``requests`` holds (request, shift) of every pair, ``limits`` the fork position of every pair, ``padding`` the
        requests that are padding.
        """
        shifts = np.zeros(len(self.pair), np.int64)
        for index, (request, shift) in enumerate(requests):
            self.pair[request], shifts[request] = index, shift
        if shifts.any():
            self.position = self.rows.position - shifts[self.rows.request]
        self.pair_of_row = self.pair[self.rows.request]
        self.code = np.where(self.position >= limits[self.pair_of_row], FORKED, UNALIGNED)
        self.code[self.rows.is_replaced] = REPLACED
        if padding:
            self.code[np.isin(self.rows.request, list(padding))] = PADDING

    def step(self, rows: Array) -> Array:
        """Return the step of each row in the baseline's numbering."""
        return self._steps[self.rows.grid[rows]]

    def free(self, *, of_branches: bool = False) -> Array:
        """Return the indices of unmatched rows outside of draft trees, or with ``of_branches`` on branches of draft
        trees."""
        is_free = (self.code == UNALIGNED) & (self.pair_of_row >= 0)
        return np.flatnonzero(is_free & ((self.rows.branch > 0) == of_branches))

    def count(self, code: int) -> int:
        """Return the number of rows with this code."""
        return int((self.code == code).sum())

    def side_rows(self) -> SideRows:
        """Return the slot tables of all grids, filled with row pairs and codes."""
        at: dict[tuple[int, int | None], dict[int, StepRows]] = {}
        order = np.argsort(self.rows.grid, kind="stable")
        bounds = np.searchsorted(self.rows.grid[order], np.arange(len(self.rows.grids) + 1))
        for index, grid in enumerate(self.rows.grids):
            rows = order[bounds[index] : bounds[index + 1]]
            slots = self.rows.slot[rows]
            pairs = np.full(_num_slots(grid, slots), PADDING, np.int64)
            pairs[slots] = self.code[rows]
            shared = StepRows(grid.shape, pairs, grid.micro is None)
            at.setdefault((grid.step, grid.micro), {}).update(dict.fromkeys(grid.ranks, shared))
        return SideRows(at)


def _num_slots(grid: Grid, used: Array) -> int:
    """Return the number of slots of the grid, extended if its rows exceed the grid."""
    return max(math.prod(grid.shape), int(used.max(initial=-1)) + 1)


class RowPairing(Struct):
    """Matches the rows of two runs in passes, each row at most once."""

    sides: tuple[RowPairingSide, RowPairingSide]
    parts: list[tuple[Array, Array]] = field(default_factory=list)
    """(baseline rows, target rows) matched by each pass."""
    names: tuple[str, ...] = ()
    late_starts: tuple[tuple[str, int] | None, tuple[str, int] | None] = (None, None)
    """See :attr:`.RowMap.late_starts`."""

    def enter(
        self, pairs: Sequence[RequestPair], forks: Sequence[Fork], padding: tuple[Collection[int], Collection[int]]
    ) -> None:
        """Match the rows of the paired requests up to their forks; ``padding`` are the requests of each side that are
        padding."""
        limits = np.full(len(pairs) + 1, NEVER)  # the last entry is for rows of unpaired requests (index -1)
        for fork in forks:
            limits[fork.index] = fork.position
        left, right = self.sides
        left.enter([(p.baseline, 0) for p in pairs], limits, padding[0])
        right.enter([(p.target, p.shift) for p in pairs], limits, padding[1])
        self.late_starts = _late_starts(pairs, left.rows, right.rows)
        self.names = tuple(left.rows.requests[p.baseline].label for p in pairs)
        for keyed_rows in self._passes():
            self._join(*keyed_rows)

    def _passes(self) -> Iterator[tuple[tuple[Array, Array], tuple[Array, Array]]]:
        """Yield for each pass (rows, third matching key) of both sides; the first two keys are request and position.

        Rows of a draft model's trees are matched by branch. Rows recomputed without a recorded visit (an epoch, a
        growing prompt) are matched by step, all other rows by visit, and the rest in order of computation.
        """
        left, right = self.sides
        rows = [side.free(of_branches=True) for side in self.sides]
        yield (rows[0], left.rows.branch[rows[0]]), (rows[1], right.rows.branch[rows[1]])
        silent = np.zeros(len(self.names) + 1, bool)
        for side in self.sides:
            silent[side.pair_of_row[side.rows.is_recomputed > side.rows.visit]] = True
        silent[-1] = False
        rows = [mine[silent[side.pair_of_row[mine]]] for side in self.sides for mine in (side.free(),)]
        yield (rows[0], left.step(rows[0])), (rows[1], right.step(rows[1]))
        rows = [side.free() for side in self.sides]
        yield (rows[0], left.visit[rows[0]]), (rows[1], right.visit[rows[1]])
        rows = [side.free() for side in self.sides]
        yield (rows[0], left.rows.is_recomputed[rows[0]]), (rows[1], right.rows.is_recomputed[rows[1]])

    def _join(self, one: tuple[Array, Array], two: tuple[Array, Array]) -> None:
        """Match rows of equal (request, position, third key), each key once."""
        left, right = self.sides
        if not len(one[0]) or not len(two[0]):
            return
        columns = [
            (side.pair_of_row[rows], side.position[rows], third)
            for side, (rows, third) in zip((left, right), (one, two), strict=True)
        ]
        keys = _packed(columns)
        del columns
        first, second = matching_keys(*keys)
        mine, other = one[0][first], two[0][second]
        order = np.argsort(mine, kind="stable")
        self.parts.append((mine[order], other[order]))
        left.code[mine], right.code[other] = 0, 0  # no longer free; numbered when all passes are done

    def row_map(self, forks: tuple[Fork, ...], notes: tuple[str, ...], problems: tuple[str, ...]) -> RowMap:
        """Number the pairs in the baseline's order, classify the remaining rows, and return the row map."""
        left, right = self.sides
        none = np.empty(0, np.int64)
        mine, other = (np.concatenate(rows) for rows in zip((none, none), *self.parts, strict=True))
        order = np.argsort(mine, kind="stable")
        mine, other = mine[order], other[order]
        left.code[mine] = right.code[other] = np.arange(len(mine))
        num_drafts = 0
        for side, met in ((left, mine), (right, other)):
            if len(rest := side.free()):
                columns = [(side.pair_of_row[rows], side.position[rows], np.zeros_like(rows)) for rows in (rest, met)]
                keys = _packed(columns)
                side.code[rest[np.isin(keys[0], keys[1])]] = RECOMPUTED
            drafts = (side.code == UNALIGNED) & side.is_draft
            side.code[drafts] = REPLACED
            num_drafts += int(drafts.sum())
        if num_drafts:
            rows = "1 row of a draft model was" if num_drafts == 1 else f"{num_drafts:,} rows of draft models were"
            notes = (*notes, f"{rows} computed by one run only: the runs drafted different tokens there")
        forked, unaligned, again, superseded = (
            (left.count(what), right.count(what)) for what in (FORKED, UNALIGNED, RECOMPUTED, REPLACED)
        )
        return RowMap(
            baseline=left.side_rows(),
            target=right.side_rows(),
            requests=self.names,
            pair_request=left.pair_of_row[mine],
            pair_position=left.position[mine],
            pair_visit=left.visit[mine],
            pair_branch=left.rows.branch[mine],
            num_forked=forked,
            num_unaligned=unaligned,
            num_recomputed=again,
            num_replaced=superseded,
            late_starts=self.late_starts,
            forks=forks,
            notes=notes,
            problems=problems,
        )


def _late_starts(
    pairs: Sequence[RequestPair], left: RequestHistory, right: RequestHistory
) -> tuple[tuple[str, int] | None, tuple[str, int] | None]:
    late: list[tuple[str, int] | None] = [None, None]
    for pair in pairs:
        one, two = left.requests[pair.baseline], right.requests[pair.target]
        if one.first != (begin := two.first - pair.shift):
            side, request = (0, one) if one.first > begin else (1, two)
            late[side] = late[side] or (request.label, request.first)
    return late[0], late[1]


def _packed(sides: Sequence[tuple[Array, Array, Array]]) -> list[Array]:
    """Pack the columns of each side into one integer per row; integers are equal exactly if all columns are."""
    if not all(len(side[0]) for side in sides):
        return [np.empty(len(side[0]), np.int64) for side in sides]
    lows = [min(int(side[i].min()) for side in sides) for i in range(3)]
    spans = [max(int(side[i].max()) for side in sides) - low + 1 for i, low in enumerate(lows)]
    packed = []
    for side in sides:
        key = np.zeros(len(side[0]), np.int64)
        for column, low, span in zip(side, lows, spans, strict=True):
            key *= span
            key += column
            key -= low
        packed.append(key)
    return packed
