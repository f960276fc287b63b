"""StoredTensors: look up the tensors of a recorded run by step, or by request and position."""

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
"""(step, index in the flattened token grid)"""
Place = tuple[str, int, int, str]
"""(site, occurrence, microbatch, pass)"""


class StoredRows(NamedTuple):
    """Rows of a record, and the corresponding rows of a live tensor."""

    record: Record
    stored: Sequence[int] | Array | None
    """Row indices in the record, flattened over its token axes; None for the whole tensor."""
    live: Sequence[int] | Array | None
    """Row indices in the live tensor, flattened over its token axes; None for the whole tensor."""
    num_token_axes: int = 1
    """Number of leading axes of the record that form the token grid."""


class NotRecordedError(LookupError):
    """The run does not contain the value, or does not contain it yet."""


class StoredTensors:
    """The tensors of one rank of a run, readable in the token layout of a live step."""

    def __init__(self, run: Run, rank: int | None = None) -> None:
        """Index the records of ``rank``.

        Raises ConfigError for a run of several ranks if ``rank`` is None, because its tensors may be shards.
        """
        if rank is None and len(run.ranks) > 1:
            raise ConfigError(f"{run.path} has {len(run.ranks)} ranks; only the tensors of a run of one rank are whole")
        self._rank = rank
        self.reload(run)

    def reload(self, run: Run) -> None:
        """Index the records of ``run``, a later state of the same run."""
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
        """Return whether any step has values of ``site``."""
        return site in self.sites

    def record(self, place: Place, step: int) -> Record | None:
        """Return the record of one step, with or without values; None if there is none."""
        return self._records.get((place, step))

    def read(self, site: str, step: StepInfo, live: torch.Tensor, occurrence: int = 0) -> torch.Tensor:
        """Return the recorded value that corresponds to ``live``, with its shape, device and dtype.

        If the recorded step has the same layout, the whole tensor is returned. Otherwise each row is read from the step
        that computed it, and padding rows keep their live values. Raises LookupError that states the mismatch or the
        missing rows.
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
        """Return a recorded step with the same rows in the same slots, preferably of the same number, or None."""
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
        """Return the stored rows for every token row of ``step``, one item per recorded step.

        Raises NotRecordedError if rows are missing, and LookupError if the rows of the record are not tokens.
        """
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
    """Return the rank of ``run`` whose tensors correspond to this rank; None if the run has only one rank.

    Raises ConfigError that names ``setting`` if the meshes differ.
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
    """Return the number of leading axes that form the step's token grid (1 or 2); None if there are none."""
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
    """Reshape a tensor to ``[slots, ...]``; None if its leading axes are not the token grid."""
    axes = num_token_axes(tensor.shape, grid)
    return None if axes is None else _flat(tensor, axes)


def _flat(tensor: torch.Tensor, num_axes: int) -> torch.Tensor:
    """Flatten the leading ``num_axes`` axes into one."""
    return tensor if num_axes == 1 else tensor.reshape(-1, *tensor.shape[num_axes:])


def _tensor(run: Run, record: Record) -> torch.Tensor:
    array = np.array(run.array(record))
    if array.dtype.kind == "V" or array.dtype.name.startswith(("bfloat16", "float8")):
        array = array.astype(np.float32)  # lossless
    return torch.from_numpy(array)


def _shape(shape: Any) -> str:
    return "×".join(map(str, shape)) or "scalar"
