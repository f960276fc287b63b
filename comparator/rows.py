"""Rows: which token row of the baseline is which token row of the target, from the step tables of both runs.

A row is known by (request, position, visit). It is comparable while every earlier token of its request, and its own,
is equal on both sides; where they part the request is *forked*, and its later rows are set aside.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tapscope.comparator.requests import Fork, find_forks, match_requests
from tapscope.ledger import StepLine
from tapscope.run import Run

Array = np.ndarray[Any, Any]

PADDING, FORKED, UNALIGNED, AGAIN = -1, -2, -3, -4
"""Codes in a slot table for slots that have no pair: no token, behind a fork, never computed by the other run, and
computed again (visit > 0) by one run only."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """The token grid of one step of one side."""

    grid: tuple[int, ...]
    pairs: Array
    """[slots] int64: index of the row pair, or a code above."""

    @property
    def num_slots(self) -> int:
        """Slots of the flattened grid, padding included."""
        return len(self.pairs)


@dataclass(frozen=True, slots=True)
class RowMap:
    """The row pairs of two runs, and what could not be paired."""

    baseline: Mapping[int, StepRows]
    """Step -> its grid."""
    target: Mapping[int, StepRows]
    requests: tuple[str, ...]
    """Baseline names of the paired requests."""
    pair_request: Array
    """[pairs] index into :attr:`requests`."""
    pair_position: Array
    pair_visit: Array
    num_forked: tuple[int, int] = (0, 0)
    """Rows set aside behind a fork, on (baseline, target)."""
    num_unaligned: tuple[int, int] = (0, 0)
    """Rows whose token the other run never computed, on (baseline, target)."""
    num_again: tuple[int, int] = (0, 0)
    """Rows that only one run computed again (preemption), on (baseline, target)."""
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


@dataclass(slots=True)
class _Table:
    """All rows of one side as columns of equal length."""

    request: list[Array] = field(default_factory=list)
    position: list[Array] = field(default_factory=list)
    visit: list[Array] = field(default_factory=list)
    step: list[Array] = field(default_factory=list)
    slot: list[Array] = field(default_factory=list)

    def columns(self) -> list[Array]:
        """request, position, visit, step, slot."""
        lists = (self.request, self.position, self.visit, self.step, self.slot)
        return [np.concatenate(parts) if parts else np.empty(0, np.int64) for parts in lists]


def map_rows(baseline: Run, target: Run, steps: frozenset[int] | None = None) -> RowMap:
    """Pair the rows of the selected ``steps`` of both runs."""
    left, left_problems = _lines(baseline, steps)
    right, right_problems = _lines(target, steps)
    problems = (*left_problems, *right_problems)
    if not left or not right:
        none = np.empty(0, np.int64)
        return RowMap({}, {}, (), none, none, none, problems=problems)
    requests, notes, missing = match_requests(baseline, target, _names(left), _names(right))
    forks, unchecked = find_forks(baseline, target, requests)
    tables = [
        _columns(left, {a: i for i, (a, _) in enumerate(requests)}),
        _columns(right, {b: i for i, (_, b) in enumerate(requests)}),
    ]
    return _pair(left, right, requests, tables, forks, (*notes, *unchecked), (*problems, *missing))


def _lines(run: Run, steps: frozenset[int] | None) -> tuple[dict[int, StepLine], list[str]]:
    """Each selected step's line of its lowest rank; ranks whose rows differ are a problem that is said."""
    chosen: dict[int, StepLine] = {}
    odd: list[int] = []
    for step, by_rank in run.steps.items():
        if steps is not None and step not in steps:
            continue
        line = by_rank[min(by_rank)]
        if not line.info.grid or not line.info.rows:
            continue
        chosen[step] = line
        if any(other.info.rows != line.info.rows for other in by_rank.values()):
            odd.append(step)
    if not odd:
        return chosen, []
    return chosen, [
        f"ranks of {run.name} hold different rows from step {odd[0]} on (data or context parallel): only those of the "
        "lowest rank are aligned"
    ]


def _names(lines: Mapping[int, StepLine]) -> list[str]:
    return list(dict.fromkeys(run.request for line in lines.values() for run in line.info.rows))


def _columns(lines: Mapping[int, StepLine], requests: Mapping[str, int]) -> list[Array]:
    table = _Table()
    for step, line in lines.items():
        for run in line.info.rows:
            table.request.append(np.full(run.count, requests.get(run.request, -1), np.int64))
            table.position.append(np.arange(run.position, run.position + run.count, dtype=np.int64))
            table.visit.append(np.full(run.count, run.visit, np.int64))
            table.step.append(np.full(run.count, step, np.int64))
            table.slot.append(np.arange(run.slot, run.slot + run.count, dtype=np.int64))
    return table.columns()


def _pair(
    left: Mapping[int, StepLine],
    right: Mapping[int, StepLine],
    requests: list[tuple[str, str]],
    tables: list[list[Array]],
    forks: tuple[Fork, ...],
    notes: tuple[str, ...],
    problems: tuple[str, ...],
) -> RowMap:
    limits = np.full(len(requests) + 1, np.iinfo(np.int64).max)  # the last one is for rows of unpaired requests (-1)
    for fork in forks:
        limits[fork.index] = fork.position
    codes = [_codes(columns, limits) for columns in tables]
    keys = [_keys(columns, code) for columns, code in zip(tables, codes, strict=True)]
    _, first, second = np.intersect1d(keys[0][1], keys[1][1], return_indices=True)
    order = np.argsort(keys[0][0][first], kind="stable")  # pairs in the baseline's order
    rows = keys[0][0][first[order]], keys[1][0][second[order]]
    for code, mine in zip(codes, rows, strict=True):
        code[mine] = np.arange(len(mine))
    for code, columns in zip(codes, tables, strict=True):
        code[(code == UNALIGNED) & (columns[2] > 0)] = AGAIN
    forked, unaligned, again = (
        (int((codes[0] == what).sum()), int((codes[1] == what).sum())) for what in (FORKED, UNALIGNED, AGAIN)
    )
    request, position, visit = (column[rows[0]] for column in tables[0][:3])
    return RowMap(
        _grids(left, tables[0], codes[0]),
        _grids(right, tables[1], codes[1]),
        tuple(a for a, _ in requests),
        request,
        position,
        visit,
        forked,
        unaligned,
        again,
        forks,
        notes,
        problems,
    )


def _codes(columns: list[Array], limits: Array) -> Array:
    request, position = columns[:2]
    return np.where(position >= limits[request], FORKED, UNALIGNED)


def _keys(columns: list[Array], code: Array) -> tuple[Array, Array]:
    """(rows, keys) of the rows that may pair, each key once."""
    request, position, visit = columns[:3]
    rows = np.flatnonzero((code == UNALIGNED) & (request >= 0))
    triples = np.stack([request[rows], position[rows], visit[rows]], axis=1)
    keys = np.ascontiguousarray(triples).view([("request", "i8"), ("position", "i8"), ("visit", "i8")]).reshape(-1)
    keys, first = np.unique(keys, return_index=True)
    return rows[first], keys


def _grids(lines: Mapping[int, StepLine], columns: list[Array], codes: Array) -> dict[int, StepRows]:
    step, slot = columns[3:]
    grids: dict[int, StepRows] = {}
    starts = np.searchsorted(step, list(lines))
    for (number, line), start in zip(lines.items(), starts, strict=True):
        rows = slice(int(start), int(start) + line.info.num_rows)
        pairs = np.full(_slots(line.info.grid, slot[rows]), PADDING, np.int64)
        pairs[slot[rows]] = codes[rows]
        grids[number] = StepRows(line.info.grid, pairs)
    return grids


def _slots(grid: Iterable[int], used: Array) -> int:
    """Slots of the grid; a table whose rows lie outside its own grid is given room rather than trusted."""
    return max(math.prod(list(grid)), int(used.max(initial=-1)) + 1)
