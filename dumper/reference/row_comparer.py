"""RowComparer: measures a live tensor against the rows of a recorded run that correspond to it."""

import json
import math
from typing import Any, NamedTuple

import numpy as np
import torch

from tapscope.core import dims, dtypes
from tapscope.core.errors import DimsError
from tapscope.core.observe import RankInfo, StepInfo
from tapscope.dumper.records.record_layout import RecordLayout
from tapscope.dumper.records.snapshot import local_tensor
from tapscope.dumper.reference.stored_tensors import Array, Place, StoredRows, StoredTensors, num_token_axes, rank_of
from tapscope.kernels.native.compare import compare_rows
from tapscope.kernels.native.measure import RowMeasures
from tapscope.run_format.record import Record
from tapscope.run_format.run import Run


class MeasuredRows(NamedTuple):
    """A live tensor compared with the reference."""

    measures: RowMeasures
    live: Array | None
    """Token row of each measured row; None if rows are not tokens."""

    def without(self, slots: set[int]) -> "MeasuredRows":
        """The rows that are not in ``slots``."""
        assert self.live is not None
        kept = np.flatnonzero(~np.isin(self.live, list(slots)))
        measures = RowMeasures(self.measures.floats[:, kept], self.measures.integers[:, kept])
        return MeasuredRows(measures, self.live[kept])


class RowComparer:
    """Compares tensors of one rank with the rows that a run stored of them, step by step."""

    def __init__(self, run: Run, info: RankInfo) -> None:
        """Raises ConfigError if the ranks of ``run`` do not correspond to this one."""
        self._run, self._info = run, info
        self._stored = StoredTensors(run, rank_of(run, info, "against"))
        self._step: StepInfo | None = None
        self._same_step: int | None = None
        self._slots: Array = np.empty(0, np.int64)
        """Slots of the token rows of the step."""
        self._holds_all = False
        """Whether these are all slots of its grid, in order."""
        self._dims: dict[str, str | None] = {}
        """Members of a layout -> its dims."""

    def begin(self, step: StepInfo) -> None:
        """A step begins; its requests have the names of the run."""
        self._step, self._same_step = step, self._stored.same_step(step)
        spans = [np.arange(span.slot, span.slot + span.count) for span in step.rows]
        self._slots = np.concatenate(spans) if spans else np.empty(0, np.int64)
        self._holds_all = np.array_equal(self._slots, np.arange(math.prod(step.grid)))

    def record(self, place: Place) -> Record | None:
        """The record of the run's step with the same rows in the same slots, with or without values."""
        return None if self._same_step is None else self._stored.record(place, self._same_step)

    def rows(self, place: Place, layout: RecordLayout) -> list[StoredRows]:
        """The stored rows for a tensor; raises LookupError with what is missing."""
        assert self._step is not None
        if not self._stored.has(place[0]):
            raise LookupError("the reference has no values of the site")
        whole = self._whole(place, self._step, layout)
        if whole is None and not self._step.rows:
            raise LookupError("the reference does not have this step, or has it with another shape")
        return [whole] if whole is not None else self._stored.rows(place, self._step)

    def measure(self, tensor: torch.Tensor, found: list[StoredRows], layout: RecordLayout) -> MeasuredRows:
        """Compare a tensor with its stored rows; raises LookupError if they do not correspond."""
        assert self._step is not None
        return self._measure(_array(local_tensor(tensor).cpu(), layout.dtype), found, self._step, layout)

    # ---- inside

    def _whole(self, place: Place, step: StepInfo, layout: RecordLayout) -> StoredRows | None:
        """The record of the same step, if it has the same layout."""
        record = self.record(place)
        if record is None or record.entry is None or record.slice is not None:
            return None
        grid = (sum(n for _, n in layout.rows),) if layout.rows is not None else step.grid
        axes = num_token_axes(layout.shape, grid)
        if step.rows and axes is not None and layout.rows is None and record.rows is None:
            return StoredRows(record, self._slots, self._slots, axes)
        return StoredRows(record, None, None)

    def _measure(self, live: Array, found: list[StoredRows], step: StepInfo, layout: RecordLayout) -> MeasuredRows:
        parts, slots = list[RowMeasures](), list[Array]()
        for one in found:
            stored = self._run.array(one.record)
            if one.live is None or one.stored is None:
                stored = self._shard(stored, live.shape, 0, layout)
                return MeasuredRows(compare_rows(_matrix(stored), _matrix(live)), None)
            axes = num_token_axes(live.shape, step.grid)
            if axes is None or layout.rows is not None:
                raise LookupError("its rows are not the tokens of the step")
            flat = stored.reshape(-1, *stored.shape[one.num_token_axes :])
            rows = live.reshape(-1, *live.shape[axes:])
            flat = self._shard(flat, rows.shape, 1, layout, axes)
            here, there = np.asarray(one.live, np.int64), np.asarray(one.stored, np.int64)
            if one.live is self._slots and self._holds_all:
                parts.append(compare_rows(_matrix(flat, 1), _matrix(rows, 1)))
            else:
                parts.append(compare_rows(_matrix(flat, 1), _matrix(rows, 1), there, here))
            slots.append(here)
        if not parts:
            raise LookupError("its tokens are not those of the reference")
        return MeasuredRows(parts[0] if len(parts) == 1 else RowMeasures.concat(parts), np.concatenate(slots))

    def _shard(
        self,
        stored: Array,
        shape: tuple[int, ...],
        first: int,
        layout: RecordLayout,
        num_token_axes: int = 0,
    ) -> Array:
        """This rank's shard of a whole stored tensor, by the dims of the live one; axes before ``first`` are rows."""
        text = self._dims_of(layout)
        if self._is_partial(text):
            raise LookupError("a partial sum of one rank")
        if stored.shape[first:] == shape[first:]:
            return stored
        misfit = f"shape {_shape(shape)}, recorded {_shape(stored.shape)}"
        if text is None or stored.ndim != len(shape):
            raise LookupError(misfit)
        try:
            parsed = dims.parse(text)
        except DimsError as error:
            raise LookupError(str(error)) from None
        skew = parsed.ndim - len(shape)  # the token grid of two axes is one here
        for axis, shard in parsed.shards():
            at, dim = axis - skew, parsed.dims[axis]
            if dim.sections or dim.groups or shard.order or at < first:
                raise LookupError(f"sharded as {dim}, which is not compared live")
            size, place = self._info.mesh.get(shard.axis, 1), self._info.coords.get(shard.axis, 0)
            if stored.shape[at] != size * shape[at]:
                raise LookupError(misfit)
            part = [slice(None)] * stored.ndim
            part[at] = slice(place * shape[at], (place + 1) * shape[at])
            stored = stored[tuple(part)]
        if stored.shape[first:] != shape[first:]:
            raise LookupError(misfit)
        return np.ascontiguousarray(stored)

    def _dims_of(self, layout: RecordLayout) -> str | None:
        if layout.members not in self._dims:
            self._dims[layout.members] = json.loads(f"{{{layout.members[1:]}}}").get("dims")
        return self._dims[layout.members]

    def _is_partial(self, text: str | None) -> bool:
        """Whether dims name a sum of which this rank has a part, and the reference all."""
        if text is None or len(self._run.ranks) > 1 or all(size == 1 for size in self._info.mesh.values()):
            return False
        try:
            partial = [shard.axis for _, shard in dims.parse(text).shards() if shard.partial]
        except DimsError:
            return False
        return any(self._info.mesh.get(axis, 1) > 1 for axis in partial)


def _array(tensor: torch.Tensor, dtype: str) -> Array:
    """A tensor in host memory as an array, without a copy if it is contiguous."""
    dense = tensor.contiguous()
    if dense.numel() == 0:
        return np.empty(tuple(dense.shape), dtypes.numpy_dtype(dtype))
    raw = dense.reshape(-1).view(torch.uint8).numpy()
    return raw.view(dtypes.numpy_dtype(dtype)).reshape(tuple(dense.shape))


def _matrix(array: Array, num_axes: int | None = None) -> Array:
    """As [rows, width]: the leading ``num_axes``, or all but the last, are rows."""
    if array.ndim == 0:
        return array.reshape(1, 1)
    if num_axes is None:
        return array.reshape(-1, array.shape[-1])
    return np.ascontiguousarray(array).reshape(array.shape[0], -1)


def _shape(shape: Any) -> str:
    return "×".join(map(str, shape)) or "scalar"
