"""Token grids of a run's steps, one for all ranks that compute the same rows."""

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
    """The rows of one step, or of one microbatch of it, on some ranks."""

    step: int
    micro: int | None
    """None if the rows are those of every microbatch of the step."""
    phase: str
    shape: tuple[int, ...]
    """``(tokens,)`` packed or ``(batch, sequence)`` padded."""
    rows: tuple[RowSpan, ...]
    tokens: Sequence[int]
    """Token id of every row; empty if unknown."""
    drafts: Mapping[str, int]
    """Request -> how many of its last rows are draft tokens."""
    rejected: Mapping[str, int]
    """Request -> how many of these are known to have been rejected."""
    branches: Mapping[str, Sequence[int]]
    """Request -> which of these were accepted, from 0, of the requests whose drafts are a tree."""
    ranks: tuple[int, ...]
    """Data- and context-parallel ranks hold different rows and have their own grids."""


class TokenGrids(Struct, frozen=True):
    """The token rows of a run's steps."""

    grids: tuple[Grid, ...]
    notes: tuple[str, ...] = ()
    """Assumptions made."""
    doubts: tuple[str, ...] = ()
    """Why the rows are not reliable."""


class StepRows(Struct, frozen=True):
    """The token grid of one step of one side, with the row pair of every slot."""

    grid: tuple[int, ...]
    pairs: Array
    """[slots] int64: index of the row pair, or a code of :mod:`..alignment.row_map`."""
    whole_step: bool = True
    """False for the grid of a single microbatch, whose rows occur nowhere else."""

    @property
    def num_slots(self) -> int:
        """Slots of the flattened grid, padding included."""
        return len(self.pairs)


class SideRows(Struct, frozen=True):
    """The row pairs of one side, by step and rank."""

    at: Mapping[tuple[int, int | None], Mapping[int, StepRows]]
    """(step, microbatch or None for all) -> rank -> its grid; ranks with equal rows share one."""

    def __bool__(self) -> bool:
        return bool(self.at)

    def of(self, record: Record) -> StepRows | None:
        """Return the grid that holds a record's rows; None if unknown."""
        key = record.key
        by_rank = self.at.get((key.step, key.micro)) or self.at.get((key.step, None)) or {}
        return by_rank.get(key.rank)

    def gathered(self, run: Run) -> "SideRows":
        """Return the rows of tensors that every data-parallel rank holds of all of them, in the order of the ranks, as
        SGLang gathers them before the experts; empty if no step has such ranks."""
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
        """Step -> its distinct grids, by microbatch and lowest rank."""
        by_step: dict[int, list[StepRows]] = {}
        for (step, _), by_rank in sorted(self.at.items(), key=lambda item: (item[0][0], item[0][1] or 0)):
            here = by_step.setdefault(step, [])
            here += {id(rows): rows for rows in by_rank.values()}.values()
        return by_step


def recorded_grids_of(run: Run, steps: frozenset[int] | None = None, ranks: frozenset[int] | None = None) -> list[Grid]:
    """Return the grids of the selected steps and ranks, by step and lowest rank; steps without recorded rows have
    none."""
    grids: list[Grid] = []
    for step in sorted(run.steps):
        if steps is None or step in steps:
            lines = run.steps[step]
            infos = {rank: line.info for rank, line in lines.items() if line.info.grid and line.info.rows}
            recorded = {rank: _named(info) for rank, info in infos.items()}
            grids += group_ranks(run, step, None, recorded)
    return select_grids(grids, ranks)


def _named(info: StepInfo) -> StepInfo:
    """Return the step, without branches unless it is of a draft model: which drafts were accepted tells the others
    apart."""
    if info.phase == DRAFT_PHASE or not any(run.branch for run in info.rows):
        return with_draft_names(info)
    return structs.replace(info, rows=tuple(structs.replace(run, branch=0) for run in info.rows))


def draft_steps_of(run: Run) -> frozenset[int]:
    """Return the steps that a draft model computed, for speculative decoding."""
    return frozenset(
        step for step, lines in run.steps.items() if any(line.info.phase == DRAFT_PHASE for line in lines.values())
    )


def select_grids(grids: Iterable[Grid], ranks: frozenset[int] | None) -> list[Grid]:
    """Return the grids of any of the selected ranks."""
    return [grid for grid in grids if ranks is None or not ranks.isdisjoint(grid.ranks)]


def group_ranks(run: Run, step: int, micro: int | None, recorded: Mapping[int, StepInfo]) -> list[Grid]:
    """One grid for all ranks that recorded the same rows; ranks that recorded none join the nearest group."""
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
    """Request -> rejected draft rows, as far as one of ``ranks`` recorded how many were accepted."""
    if not info.drafts:
        return {}
    counts = (line.counts for rank, line in run.steps[step].items() if rank in ranks)
    accepted = next((each.accepted for each in counts if each is not None and each.accepted), {})
    return {name: max(0, info.drafts.get(name, 0) - number) for name, number in accepted.items()}


def _branches(run: Run, step: int, ranks: Iterable[int], info: StepInfo) -> Mapping[str, Sequence[int]]:
    """Request -> accepted draft rows of its tree, as far as one of ``ranks`` recorded them."""
    if not info.drafts:
        return {}
    counts = (line.counts for rank, line in run.steps[step].items() if rank in ranks)
    return next((each.accepted_branches for each in counts if each is not None and each.accepted_branches), {})


def _nearest(groups: Iterable[list[int]], coords: Mapping[int, Mapping[str, int]], rank: int) -> list[int]:
    """Return the ranks with the same rows as a rank without a row table (a later pipeline stage), by mesh
    coordinates."""

    def distance(group: list[int]) -> int:
        mine, other = coords[rank], coords[group[0]]
        return sum(mine.get(axis) != other.get(axis) for axis in {*mine, *other} - _SAME_ROWS_AXES)

    return min(groups, key=distance)


def lineages(run: Run, grids: Iterable[Grid]) -> dict[int, int]:
    """Rank -> a number that separates data-parallel ranks: a generated request name means another request there.

    By the data-parallel coordinates if the mesh has any. Otherwise ranks that compute the same positions of one name in
    one step are data parallel, and ranks that compute different ones hold parts of one request (context parallel).
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
