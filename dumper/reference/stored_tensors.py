"""StoredTensors: the tensors of a recorded run, found by step or by request and position."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from tapscope.core.errors import ConfigError
from tapscope.core.observe import RankInfo, RowSpan, StepInfo
from tapscope.run_format.record import FORWARD, Record
from tapscope.run_format.run import Run

Array = np.ndarray[Any, Any]
Slot = tuple[int, int]
"""(step, index in the flattened token grid)."""
Place = tuple[str, int, int, str]
"""(site, occurrence, microbatch, pass)."""


class StoredRows(NamedTuple):
    """Stored values that correspond to live ones."""

    record: Record
    stored: Sequence[int] | Array | None
    """Rows of the record; None for the whole tensor."""
    live: Sequence[int] | Array | None
    """Rows of the live tensor, flattened over its token axes."""
    num_token_axes: int = 1
    """Leading axes of the record that are the token grid."""


class NotRecordedError(LookupError):
    """A value that the run does not have, or not yet."""


class StoredTensors:
    """The tensors of one rank of a run, in the token layout of a live step.

    Raises ConfigError for a run of several ranks without a ``rank``: its tensors may be shards.
    """

    def __init__(self, run: Run, rank: int | None = None) -> None:
        if rank is None and len(run.ranks) > 1:
            raise ConfigError(f"{run.path} has {len(run.ranks)} ranks; only the tensors of a run of one rank are whole")
        self._rank = rank
        self.reload(run)

    def reload(self, run: Run) -> None:
        """Take the tensors of ``run`` instead: a later state of the same one."""
        rank, self.run = self._rank, run
        self._records: dict[tuple[Place, int], Record] = {}
        for record in run.records:
            key = record.key
            if rank in (None, key.rank):
                self._records[(key.site, key.occurrence, key.micro, key.pass_), key.step] = record
        self.sites = {place[0] for (place, _), record in self._records.items() if record.entry is not None}
        """Sites with values."""
        self.steps = {step: lines.get(rank or 0, next(iter(lines.values()))).info for step, lines in run.steps.items()}
        self._slots: dict[tuple[str, int], Slot] = {}
        for number in sorted(self.steps):
            for span in self.steps[number].rows:
                for i in range(span.count):
                    self._slots[span.request, span.position + i] = number, span.slot + i

    def has(self, site: str) -> bool:
        """Whether any step has values of the site."""
        return site in self.sites

    def record(self, place: Place, step: int) -> Record | None:
        """The record of one step, with or without values."""
        return self._records.get((place, step))

    def read(self, site: str, step: StepInfo, live: torch.Tensor, occurrence: int = 0) -> torch.Tensor:
        """The recorded value in the place of ``live``; raises LookupError that names what is missing or does not fit.

        A tensor of the same step layout is taken whole. Otherwise each row comes from the step that computed it, and
        padding rows keep their live values.
        """
        place = site, occurrence, 0, FORWARD
        same = self.same_step(step)
        if same is not None and (record := self._with_values(place, same)) is not None:
            if tuple(record.shape) == tuple(live.shape) and record.slice is None:
                return _tensor(self.run, record).to(live.device, live.dtype)
            if not step.rows:
                raise LookupError(f"shape {_shape(live.shape)}, recorded {_shape(record.shape)}")
        rows = as_rows(live, step.grid)
        if not step.rows or rows is None:
            raise NotRecordedError("not recorded at this step, and its rows are not tokens")
        result = rows.clone()
        for part in self.rows(place, step):
            stored = None if part.record.slice else _flat(_tensor(self.run, part.record), part.num_token_axes)
            if stored is None or stored.shape[1:] != rows.shape[1:]:
                raise LookupError(f"shape {_shape(live.shape)}, recorded {_shape(part.record.shape)}")
            result[part.live] = stored[part.stored].to(live.device, live.dtype)
        return result.reshape(live.shape)

    def same_step(self, step: StepInfo) -> int | None:
        """The recorded step with the same rows in the same slots, the one of the same number if it has them."""
        if not step.rows:
            return step.step if step.step in self.steps else None
        first = self._slots.get((step.rows[0].request, step.rows[0].position))
        numbers: list[int] = [step.step] if first is None else [step.step, first[0]]
        for number in numbers:
            other = self.steps.get(number)
            if other is not None and tuple(other.grid) == tuple(step.grid) and _spans(other.rows) == _spans(step.rows):
                return number
        return None

    def rows(self, place: Place, step: StepInfo) -> list[StoredRows]:
        """The stored rows of every token row of ``step``, one item per recorded step; raises LookupError."""
        missing, live_rows = 0, sum(span.count for span in step.rows)
        wanted: dict[int, tuple[list[int], list[int]]] = {}
        for span in step.rows:
            for i in range(span.count):
                slot = self._slots.get((span.request, span.position + i))
                if slot is None or self._with_values(place, slot[0]) is None:
                    missing += 1
                    continue
                here, there = wanted.setdefault(slot[0], ([], []))
                here.append(span.slot + i)
                there.append(slot[1])
        if missing:
            raise NotRecordedError(f"{missing} of {live_rows} token rows were not recorded")
        return [self._stored(place, number, here, there) for number, (here, there) in wanted.items()]

    def _stored(self, place: Place, number: int, here: list[int], there: list[int]) -> StoredRows:
        record = self._records[place, number]
        grid = tuple(self.steps[number].grid)
        if record.rows is not None:
            order = {slot: i for i, slot in enumerate(s for a, n in record.rows for s in range(a, a + n))}
            if lacking := sum(slot not in order for slot in there):
                raise LookupError(f"{lacking} of {len(here)} token rows were not recorded")
            there, grid = [order[slot] for slot in there], (len(order),)
        axes = num_token_axes(record.shape, grid)
        if axes is None:
            raise LookupError(f"its rows are not tokens: recorded {_shape(record.shape)}")
        return StoredRows(record, there, here, axes)

    def _with_values(self, place: Place, step: int) -> Record | None:
        record = self._records.get((place, step))
        return record if record is not None and record.entry is not None else None


def rank_of(run: Run, info: RankInfo, setting: str) -> int | None:
    """The rank of ``run`` whose tensors correspond to this rank's; None for the only one.

    Raises ConfigError that names the ``setting`` of the run.
    """
    if len(run.ranks) == 1:
        return None
    mine, theirs = ({axis: n for axis, n in mesh.items() if n > 1} for mesh in (info.mesh, run.mesh))
    if mine == theirs and info.world_size == len(run.ranks):
        return info.rank
    has = ", ".join(f"{axis}={n}" for axis, n in theirs.items()) or f"{len(run.ranks)} ranks"
    own = ", ".join(f"{axis}={n}" for axis, n in mine.items()) or "one rank"
    raise ConfigError(
        f"{setting}={run.path}: recorded with {has}, this job has {own}; record that run on one rank, or on the "
        "same mesh"
    )


def _spans(rows: tuple[RowSpan, ...]) -> list[tuple[str, int, int, int]]:
    return [(span.request, span.position, span.count, span.slot) for span in rows]


def num_token_axes(shape: Sequence[int], grid: Sequence[int]) -> int | None:
    """Number of leading axes that are the step's token grid; None if they are not."""
    return _num_token_axes(tuple(shape[:2]), tuple(grid))


@lru_cache(1024)
def _num_token_axes(leading: tuple[int, ...], grid: tuple[int, ...]) -> int | None:
    size = math.prod(grid)
    if len(grid) == 2 and leading == grid:
        return 2
    if grid and leading[:1] == (size,):
        return 1
    return 2 if grid and leading == (1, size) else None


def as_rows(tensor: torch.Tensor, grid: Sequence[int]) -> torch.Tensor | None:
    """The tensor as ``[slots, ...]``; None if it does not begin with the token axes."""
    axes = num_token_axes(tensor.shape, grid)
    return None if axes is None else _flat(tensor, axes)


def _flat(tensor: torch.Tensor, num_axes: int) -> torch.Tensor:
    """The leading axes as one."""
    return tensor if num_axes == 1 else tensor.reshape(-1, *tensor.shape[num_axes:])


def _tensor(run: Run, record: Record) -> torch.Tensor:
    array = np.array(run.array(record))
    if array.dtype.kind == "V" or array.dtype.name.startswith(("bfloat16", "float8")):
        array = array.astype(np.float32)  # exact
    return torch.from_numpy(array)


def _shape(shape: Any) -> str:
    return "×".join(map(str, shape)) or "scalar"
