"""Token grids of a run's steps, each common to all ranks that compute the same rows."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, structs

from tapscope.core.observe import DRAFT_PHASE, RowSpan, StepInfo, with_draft_names
from tapscope.run_format.record import Record
from tapscope.run_format.run import Run

Array = np.ndarray[Any, Any]
_SAME_ROWS_AXES = frozenset({"pp", "tp", "sp", "ep", "etp", "attn_tp", "moe_tp", "moe_ep"})
"""Mesh axes whose ranks compute the same rows."""


class Grid(Struct, frozen=True):
    """The rows of one step, or of one microbatch of a step, on some ranks."""

    step: int
    micro: int | None
    """Microbatch; None if every microbatch of the step has these rows."""
    phase: str
    shape: tuple[int, ...]
    """``(tokens,)`` if packed, ``(batch, sequence)`` if padded."""
    rows: tuple[RowSpan, ...]
    tokens: Sequence[int]
    """Token id of every row; empty if unknown."""
    drafts: Mapping[str, int]
    """Request -> number of its last rows that are draft tokens."""
    rejected: Mapping[str, int]
    """Request -> number of its draft tokens known to have been rejected."""
    branches: Mapping[str, Sequence[int]]
    """Request -> indices of its accepted draft tokens, from 0, for requests whose drafts form a tree."""
    ranks: tuple[int, ...]
    """Ranks that compute these rows. Data- and context-parallel ranks hold different rows and have separate grids."""


class TokenGrids(Struct, frozen=True):
    """The token grids of a run, with the assumptions behind them."""

    grids: tuple[Grid, ...]
    notes: tuple[str, ...] = ()
    """Assumptions behind the grids."""
    doubts: tuple[str, ...] = ()
    """Why the rows are not reliable."""


class StepRows(Struct, frozen=True):
    """The token grid of one step of one run, with the row pair of every slot."""

    grid: tuple[int, ...]
    pairs: Array
    """[slots] int64: index of the row pair, or a code of :mod:`..alignment.row_map`."""
    whole_step: bool = True
    """False for the grid of a single microbatch, whose rows do not occur in other microbatches."""

    @property
    def num_slots(self) -> int:
        """Number of slots of the flattened grid, padding included."""
        return len(self.pairs)


class SideRows(Struct, frozen=True):
    """The row pairs of one run, by step and rank."""

    at: Mapping[tuple[int, int | None], Mapping[int, StepRows]]
    """(step, microbatch or None for all) -> rank -> grid; ranks with equal rows share one object."""

    def __bool__(self) -> bool:
        return bool(self.at)

    def of(self, record: Record) -> StepRows | None:
        """Return the grid of a record's step and rank; None if unknown."""
        key = record.key
        by_rank = self.at.get((key.step, key.micro)) or self.at.get((key.step, None)) or {}
        return by_rank.get(key.rank)

    def gathered(self, run: Run) -> "SideRows":
        """Return the row tables for tensors in which every data-parallel rank holds the rows of all of them, in rank
        order.

        SGLang gathers tensors in this way before the experts. Empty if no step has data-parallel ranks with different
        rows.
        """
        axes = [axis for axis in run.mesh if axis.endswith("dp") and run.mesh[axis] > 1]
        if not axes or run.mesh.get("cp", 1) > 1:
            return SideRows({})
        at: dict[tuple[int, int | None], Mapping[int, StepRows]] = {}
        for place, by_rank in self.at.items():
            grids = list({id(by_rank[rank]): by_rank[rank] for rank in sorted(by_rank)}.values())
            if len(grids) > 1 and all(len(one.grid) == 1 for one in grids):
                pairs = np.concatenate([one.pairs for one in grids])
                at[place] = dict.fromkeys(by_rank, StepRows((len(pairs),), pairs, grids[0].whole_step))
            elif len(grids) > 1:
                return SideRows({})
        return SideRows({**self.at, **at}) if at else SideRows({})

    def by_step(self) -> dict[int, list[StepRows]]:
        """Return the distinct grids of each step, ordered by microbatch and lowest rank."""
        by_step: dict[int, list[StepRows]] = {}
        for (step, _), by_rank in sorted(self.at.items(), key=lambda item: (item[0][0], item[0][1] or 0)):
            here = by_step.setdefault(step, [])
            here += {id(rows): rows for rows in by_rank.values()}.values()
        return by_step


def recorded_grids_of(run: Run, steps: frozenset[int] | None = None, ranks: frozenset[int] | None = None) -> list[Grid]:
    """Return the grids of the selected steps and ranks, ordered by step and lowest rank; steps without recorded rows
    have none."""
    grids: list[Grid] = []
    for step in sorted(run.steps):
        if steps is None or step in steps:
            lines = run.steps[step]
            infos = {rank: line.info for rank, line in lines.items() if line.info.grid and line.info.rows}
            recorded = {rank: _named(info) for rank, info in infos.items()}
            grids += group_ranks(run, step, None, recorded)
    return select_grids(grids, ranks)


def _named(info: StepInfo) -> StepInfo:
    """Return the step with draft names; branch numbers are kept only in steps of a draft model.

    In other steps, the accepted drafts distinguish the rows.
    """
    if info.phase == DRAFT_PHASE or not any(run.branch for run in info.rows):
        return with_draft_names(info)
    return structs.replace(info, rows=tuple(structs.replace(run, branch=0) for run in info.rows))


def draft_steps_of(run: Run) -> frozenset[int]:
    """Return the steps in which a draft model ran (speculative decoding)."""
    return frozenset(
        step for step, lines in run.steps.items() if any(line.info.phase == DRAFT_PHASE for line in lines.values())
    )


def select_grids(grids: Iterable[Grid], ranks: frozenset[int] | None) -> list[Grid]:
    """Return the grids that belong to any of the selected ranks."""
    return [grid for grid in grids if ranks is None or not ranks.isdisjoint(grid.ranks)]


def group_ranks(run: Run, step: int, micro: int | None, recorded: Mapping[int, StepInfo]) -> list[Grid]:
    """Return one grid per group of ranks that recorded the same rows; ranks without recorded rows join the nearest
    group."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, info in sorted(recorded.items(), key=lambda item: not item[1].token_ids):
        rows = info.grid, info.rows
        known = next((key for key in groups if key[:2] == rows), None) if not info.token_ids else None
        groups.setdefault(known or (*rows, array("q", info.token_ids).tobytes()), []).append(rank)
    silent = [rank for rank in run.ranks if rank not in recorded]
    if silent and recorded:
        coords = {rank: run.coords(rank) for rank in run.ranks}
        for rank in silent:
            _nearest(groups.values(), coords, rank).append(rank)
    infos = [(recorded[members[0]], members) for members in sorted(groups.values(), key=min)]
    return [
        Grid(
            step=step,
            micro=micro,
            phase=info.phase,
            shape=info.grid,
            rows=info.rows,
            tokens=info.token_ids,
            drafts=info.drafts,
            rejected=_rejected(run, step, members, info),
            branches=_branches(run, step, members, info),
            ranks=tuple(sorted(members)),
        )
        for info, members in infos
    ]


def _rejected(run: Run, step: int, ranks: Iterable[int], info: StepInfo) -> dict[str, int]:
    """Return the number of rejected draft rows per request, if any of ``ranks`` recorded how many were accepted."""
    if not info.drafts:
        return {}
    counts = (line.counts for rank, line in run.steps[step].items() if rank in ranks)
    accepted = next((each.accepted for each in counts if each is not None and each.accepted), {})
    return {name: max(0, info.drafts.get(name, 0) - number) for name, number in accepted.items()}


def _branches(run: Run, step: int, ranks: Iterable[int], info: StepInfo) -> Mapping[str, Sequence[int]]:
    """Return the accepted draft rows of each request's tree, if any of ``ranks`` recorded them."""
    if not info.drafts:
        return {}
    counts = (line.counts for rank, line in run.steps[step].items() if rank in ranks)
    return next((each.accepted_branches for each in counts if each is not None and each.accepted_branches), {})


def _nearest(groups: Iterable[list[int]], coords: Mapping[int, Mapping[str, int]], rank: int) -> list[int]:
    """Return the group with the same rows as a rank without a row table (a later pipeline stage), judging by mesh
    coordinates."""

    def distance(group: list[int]) -> int:
        mine, other = coords[rank], coords[group[0]]
        return sum(mine.get(axis) != other.get(axis) for axis in {*mine, *other} - _SAME_ROWS_AXES)

    return min(groups, key=distance)


def lineages(run: Run, grids: Iterable[Grid]) -> dict[int, int]:
    """Map ranks to lineage numbers that separate data-parallel ranks, on which equal generated names are different
    requests.

    Uses the data-parallel coordinates if the mesh has any. Otherwise, ranks that compute the same positions of one name
    in one step are data parallel. Ranks that compute different positions hold parts of one request (context parallel).
    """
    axes = [axis for axis in run.mesh if axis.endswith("dp") and run.mesh[axis] > 1]
    if axes:
        places = {rank: tuple(run.coords(rank).get(axis, 0) for axis in axes) for rank in run.ranks}
        numbers = {place: i for i, place in enumerate(sorted(set(places.values())))}
        return {rank: numbers[place] for rank, place in places.items()}
    seen: dict[tuple[int, str, int], int] = {}
    for grid in grids:
        for run_ in grid.rows:
            place = grid.step, run_.request, run_.position
            if seen.setdefault(place, grid.ranks[0]) != grid.ranks[0]:
                return {rank: grid_.ranks[0] for grid_ in grids for rank in grid_.ranks if grid_.step == grid.step}
    return {}
