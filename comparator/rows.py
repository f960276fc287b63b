"""Rows: which token row of the baseline is which token row of the target.

A row is known by (request, position, visit). It is comparable while every earlier token of its request, and its own,
is equal on both sides; where they part the request is *forked*, and its later rows are set aside.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.grids import Grid, SideRows, StepRows, Told, grids_of, lineages, selected
from tapscope.comparator.meet import meet
from tapscope.comparator.options import CompareOptions
from tapscope.comparator.recorded import called_again, recorded_grids
from tapscope.comparator.requests import Fork, Partners, find_forks, match_requests
from tapscope.comparator.tokentext import TokenText
from tapscope.comparator.trace import NEVER, Trace, trace
from tapscope.run import Run

Array = np.ndarray[Any, Any]

PADDING, FORKED, UNALIGNED, AGAIN, SUPERSEDED = -1, -2, -3, -4, -5
"""Codes in a slot table for slots that have no pair: no token, behind a fork, never computed by the other run,
computed again by one run only (preemption), and computed for a token that was replaced (a rejected draft)."""


_NONE = np.empty(0, np.int64)


class RowMap(Struct, frozen=True):
    """The row pairs of two runs, and what could not be paired."""

    baseline: SideRows
    target: SideRows
    requests: tuple[str, ...] = ()
    """Baseline names of the paired requests."""
    pair_request: Array = _NONE
    """[pairs] index into :attr:`requests`."""
    pair_position: Array = _NONE
    """[pairs] the baseline's."""
    pair_visit: Array = _NONE
    num_forked: tuple[int, int] = (0, 0)
    """Rows set aside behind a fork, on (baseline, target)."""
    num_unaligned: tuple[int, int] = (0, 0)
    """Rows whose token the other run never computed, on (baseline, target)."""
    num_again: tuple[int, int] = (0, 0)
    """Rows that only one run computed again (preemption), on (baseline, target)."""
    num_superseded: tuple[int, int] = (0, 0)
    """Rows computed for a token that was replaced later (a rejected draft), on (baseline, target)."""
    forks: tuple[Fork, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences on what was assumed or could not be checked."""
    problems: tuple[str, ...] = ()
    """Sentences on what makes the data partial."""

    @property
    def num_pairs(self) -> int:
        """Comparable row pairs."""
        return len(self.pair_request)

    @property
    def known(self) -> bool:
        """Whether both sides say which rows their steps hold."""
        return bool(self.baseline) and bool(self.target)


def map_rows(baseline: Run, target: Run, options: CompareOptions | None = None) -> RowMap:
    """Pair the rows of the selected steps and ranks of both runs."""
    options = options or CompareOptions()
    runs = baseline, target
    told = [_told(run, options.steps_of(side), options.ranks) for side, run in enumerate(runs)]
    mute = [run.name for run, one in zip(runs, told, strict=True) if not one.grids]
    if mute:
        who = f"{mute[0]} does" if len(mute) == 1 else "both runs do"
        note = f"{who} not say which token rows the steps hold: tensors are compared whole, step by step"
        return RowMap(SideRows({}), SideRows({}), notes=(note,))
    left, right = (trace(one.grids, lineages(run, one.grids)) for run, one in zip(runs, told, strict=True))
    matching = match_requests((baseline.name, target.name), left.requests, right.requests)
    forks, unchecked = find_forks(left.requests, right.requests, matching.pairs)
    for request in (*left.requests, *right.requests):
        request.tokens = TokenText()  # there may be millions, and nobody asks for them again
    work = _Pairing((_Side(left), _Side(right, options.shift_steps)))
    work.enter(matching.pairs, forks)
    notes = (*told[0].notes, *told[1].notes, *matching.notes, *unchecked)
    return work.row_map(forks, notes, (*told[0].doubts, *told[1].doubts, *matching.problems))


def _told(run: Run, steps: frozenset[int] | None, ranks: frozenset[int] | None) -> Told:
    """The grids that the host told, and where it did not those that the recorded arguments of the model tell."""
    told = grids_of(run, steps, ranks)
    read = recorded_grids(run, frozenset(grid.step for grid in told), steps)
    better = {grid.step for grid in read.grids}
    grids = [grid for grid in told if grid.step not in better] + selected(read.grids, ranks)
    again = called_again(run, frozenset(grid.step for grid in told) - better)
    return structs.replace(
        read,
        notes=(*read.notes, *again),
        grids=tuple(sorted(grids, key=lambda grid: (grid.step, grid.micro or 0, grid.ranks))),
    )


class _Side:
    """The rows of one side while they look for partners."""

    def __init__(self, rows: Trace, shift_steps: int = 0) -> None:
        self.rows = rows
        self.pair = np.full(len(rows.requests), -1, np.int32)  # request -> pair of requests
        self.position = rows.position  # in the baseline's count
        self.code = np.empty(0, np.int64)
        self.visit = np.maximum(rows.visit, rows.again) if rows.again.any() else rows.visit
        self._steps = np.array([g.step - shift_steps for g in rows.grids], np.int64)

    def enter(self, requests: Sequence[tuple[int, int]], limits: Array) -> None:
        """Take over (request, shift) of every pair, and the positions at which the pairs fork."""
        shifts = np.zeros(len(self.pair), np.int64)
        for index, (request, shift) in enumerate(requests):
            self.pair[request], shifts[request] = index, shift
        if shifts.any():
            self.position = self.rows.position - shifts[self.rows.request]
        self.pair_of_row = self.pair[self.rows.request]
        self.code = np.where(self.position >= limits[self.pair_of_row], FORKED, UNALIGNED)
        self.code[self.rows.superseded] = SUPERSEDED

    def step(self, rows: Array) -> Array:
        """The baseline's numbers of the steps that computed the rows."""
        return self._steps[self.rows.grid[rows]]

    def free(self) -> Array:
        """Rows that may still pair."""
        return np.flatnonzero((self.code == UNALIGNED) & (self.pair_of_row >= 0))

    def count(self, code: int) -> int:
        return int((self.code == code).sum())

    def side_rows(self) -> SideRows:
        """Spread the codes over the slots of the grids."""
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
    """Slots of the grid; a table whose rows lie outside its own grid is given room rather than trusted."""
    return max(math.prod(grid.shape), int(used.max(initial=-1)) + 1)


@dataclass(slots=True)
class _Pairing:
    """Pairs rows in passes, each row once."""

    sides: tuple[_Side, _Side]
    found: list[tuple[Array, Array]] = field(default_factory=list)
    """Rows of both sides that met, a pass each."""
    names: tuple[str, ...] = ()

    def enter(self, pairs: Sequence[Partners], forks: Sequence[Fork]) -> None:
        """Pair the rows of the paired requests, up to their forks."""
        limits = np.full(len(pairs) + 1, NEVER)  # the last one is for rows of unpaired requests (-1)
        for fork in forks:
            limits[fork.index] = fork.position
        left, right = self.sides
        left.enter([(p.baseline, 0) for p in pairs], limits)
        right.enter([(p.target, p.shift) for p in pairs], limits)
        self.names = tuple(left.rows.requests[p.baseline].label for p in pairs)
        for thirds in self._thirds():
            self._join(*thirds)

    def _thirds(self) -> Iterator[tuple[tuple[Array, Array], tuple[Array, Array]]]:
        """(rows, what must be equal beside request and position) of both sides, a pass each.

        What a host computes again without saying so (an epoch, a prompt that grows) meets by step; everything else by
        visit; and what is left in the order in which it was computed.
        """
        left, right = self.sides
        silent = np.zeros(len(self.names) + 1, bool)
        for side in self.sides:
            silent[side.pair_of_row[side.rows.again > side.rows.visit]] = True
        silent[-1] = False
        rows = [mine[silent[side.pair_of_row[mine]]] for side in self.sides for mine in (side.free(),)]
        yield (rows[0], left.step(rows[0])), (rows[1], right.step(rows[1]))
        rows = [side.free() for side in self.sides]
        yield (rows[0], left.visit[rows[0]]), (rows[1], right.visit[rows[1]])
        rows = [side.free() for side in self.sides]
        yield (rows[0], left.rows.again[rows[0]]), (rows[1], right.rows.again[rows[1]])

    def _join(self, one: tuple[Array, Array], two: tuple[Array, Array]) -> None:
        """Pair the rows of equal (request, position, third), each key once."""
        left, right = self.sides
        if not len(one[0]) or not len(two[0]):
            return
        columns = [
            (side.pair_of_row[rows], side.position[rows], third)
            for side, (rows, third) in zip((left, right), (one, two), strict=True)
        ]
        keys = _packed(columns)
        del columns
        first, second = meet(*keys)
        mine, other = one[0][first], two[0][second]
        order = np.argsort(mine, kind="stable")
        self.found.append((mine[order], other[order]))
        left.code[mine], right.code[other] = 0, 0  # no longer free; numbered when all passes are done

    def row_map(self, forks: tuple[Fork, ...], notes: tuple[str, ...], problems: tuple[str, ...]) -> RowMap:
        """Number the pairs in the baseline's order and count the rest."""
        left, right = self.sides
        none = np.empty(0, np.int64)
        mine, other = (np.concatenate(rows) for rows in zip((none, none), *self.found, strict=True))
        order = np.argsort(mine, kind="stable")
        mine, other = mine[order], other[order]
        left.code[mine] = right.code[other] = np.arange(len(mine))
        for side, met in ((left, mine), (right, other)):
            if not len(rest := side.free()):
                continue
            columns = [(side.pair_of_row[rows], side.position[rows], np.zeros_like(rows)) for rows in (rest, met)]
            keys = _packed(columns)
            side.code[rest[np.isin(keys[0], keys[1])]] = AGAIN
        forked, unaligned, again, superseded = (
            (left.count(what), right.count(what)) for what in (FORKED, UNALIGNED, AGAIN, SUPERSEDED)
        )
        return RowMap(
            left.side_rows(),
            right.side_rows(),
            self.names,
            left.pair_of_row[mine],
            left.position[mine],
            left.visit[mine],
            forked,
            unaligned,
            again,
            superseded,
            forks,
            notes,
            problems,
        )


def _packed(sides: Sequence[tuple[Array, Array, Array]]) -> list[Array]:
    """The columns of both sides as one integer a row; equal integers are equal columns."""
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
