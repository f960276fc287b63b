"""RowComparer: match the rows of a live tensor with the corresponding rows of a recorded run."""

import ctypes
import json
import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from tapscope.core import dims, dtypes
from tapscope.core.errors import DimsError
from tapscope.core.observe import RankInfo, StepInfo
from tapscope.dumper.records.record_layout import RecordLayout
from tapscope.dumper.records.snapshot import local_tensor
from tapscope.dumper.reference.stored_tensors import Array, Place, StoredRows, StoredTensors, num_token_axes, rank_of
from tapscope.kernels.native import library
from tapscope.kernels.native.compare import compare_strips
from tapscope.kernels.native.deviation import Deviation, deviation
from tapscope.kernels.native.measure import RowMeasures
from tapscope.kernels.native.row_blocks import Strip, checked
from tapscope.run_format.record import Record
from tapscope.run_format.run import Run


class MatchedRows(NamedTuple):
    """Rows of a live tensor, paired with those of the reference; both are in host memory."""

    strips: list[Strip]
    num_rows: int
    live: Array | None
    """[num_rows] slots of the token rows; None if the rows are not tokens."""

    def deviation(self, share: float | None) -> Deviation:
        """Measure the deviation of all rows; see :func:`.deviation` for ``share``."""
        return deviation(self.strips, self.num_rows, share)

    def measured(self) -> RowMeasures:
        """Measure the deviation of each row."""
        return compare_strips(self.strips, self.num_rows).rows

    def without(self, slots: set[int]) -> "MatchedRows":
        """Return the rows without the token rows in ``slots``."""
        assert self.live is not None
        strips, num_rows = list[Strip](), 0
        is_kept = ~np.isin(self.live, list(slots))
        for one in self.strips:
            kept = np.flatnonzero(is_kept[one.row : one.row + one.num_rows])
            left, right = (kept if rows is None else rows[kept] for rows in (one.baseline_rows, one.target_rows))
            strips.append(one._replace(baseline_rows=left, target_rows=right, row=num_rows))
            num_rows += len(kept)
        return MatchedRows(strips, num_rows, self.live[is_kept])


class RowComparer:
    """Finds the stored rows of a run for the tensors of one rank, step by step."""

    def __init__(self, run: Run, info: RankInfo) -> None:
        """``run`` is the reference; raises ConfigError if its ranks do not correspond to this rank."""
        self._run, self._info = run, info
        self._stored = StoredTensors(run, rank_of(run, info, "against"))
        self._may_be_partial = len(run.ranks) == 1 and any(size > 1 for size in info.mesh.values())
        self._step: StepInfo | None = None
        self._same_step: int | None = None
        self._slots: Array = np.empty(0, np.int64)
        """Slots of the token rows of the step."""
        self._holds_all = False
        """Whether ``_slots`` are all slots of the step's grid, in order."""
        self._dims: dict[str, str | None] = {}
        """:attr:`.RecordLayout.members` -> dims."""

    def begin(self, step: StepInfo) -> None:
        """Start a step; ``step`` has the request names of the reference."""
        self._step, self._same_step = step, self._stored.same_step(step)
        spans = [np.arange(span.slot, span.slot + span.count) for span in step.rows]
        self._slots = np.concatenate(spans) if spans else np.empty(0, np.int64)
        self._holds_all = np.array_equal(self._slots, np.arange(math.prod(step.grid)))

    def record(self, place: Place) -> Record | None:
        """Return the record of the reference step with the same rows in the same slots, with or without values."""
        return None if self._same_step is None else self._stored.record(place, self._same_step)

    def rows(self, place: Place, layout: RecordLayout, record: Record | None) -> list[StoredRows]:
        """Return the stored rows for a tensor; ``record`` is the result of :meth:`record`.

        Raises LookupError that states which data is missing.
        """
        assert self._step is not None
        if not self._stored.has(place[0]):
            raise LookupError("the reference has no values of the site")
        whole = self._whole(record, self._step, layout)
        if whole is None and not self._step.rows:
            last = max(self._stored.steps, default=-1)
            if self._step.step > last:
                raise LookupError(
                    f"the reference ends after step {last}" if last >= 0 else "the reference has no steps"
                )
            raise LookupError("the reference does not have this step, or not in full")
        return [whole] if whole is not None else self._stored.rows(place, self._step)

    def match(self, live: Array, candidates: list[StoredRows], layout: RecordLayout) -> MatchedRows:
        """Pair the rows of a live tensor with the stored ``candidates``; raises LookupError if that is impossible."""
        assert self._step is not None
        strips, slots, num_rows = list[Strip](), list[Array](), 0
        for one in candidates:
            stored = self._run.array(one.record)
            is_whole = one.live is self._slots and self._holds_all
            if (is_whole or one.live is None) and stored.shape == live.shape and not self._is_partial(layout):
                strip = _aligned(stored, live, one.num_token_axes if is_whole else None)
                return MatchedRows([strip], strip.num_rows, self._slots if is_whole else None)
            if one.live is None or one.stored is None:
                stored = self._shard(stored, live.shape, 0, layout)
                strip = checked(_matrix(stored), _matrix(live), None, None)
                return MatchedRows([strip], strip.num_rows, None)
            axes = num_token_axes(live.shape, self._step.grid)
            if axes is None or layout.rows is not None:
                raise LookupError("its rows are not the tokens of the step")
            flat = stored.reshape(-1, *stored.shape[one.num_token_axes :])
            rows = live.reshape(-1, *live.shape[axes:])
            flat = self._shard(flat, rows.shape, 1, layout)
            here, there = np.asarray(one.live, np.int64), np.asarray(one.stored, np.int64)
            index = (None, None) if is_whole else (there, here)
            strip = checked(_matrix(flat, 1), _matrix(rows, 1), *index)
            strips.append(strip._replace(row=num_rows) if num_rows else strip)
            slots.append(here)
            num_rows += strip.num_rows
        if not strips:
            raise LookupError("its tokens are not those of the reference")
        return MatchedRows(strips, num_rows, slots[0] if len(slots) == 1 else np.concatenate(slots))

    # ---- inside

    def _whole(self, record: Record | None, step: StepInfo, layout: RecordLayout) -> StoredRows | None:
        """Return ``record`` as stored rows if it has values of the whole tensor; None otherwise."""
        if record is None or record.entry is None or record.slice is not None:
            return None
        grid = (sum(n for _, n in layout.rows),) if layout.rows is not None else step.grid
        axes = num_token_axes(layout.shape, grid)
        if step.rows and axes is not None and layout.rows is None and record.rows is None:
            return StoredRows(record, self._slots, self._slots, axes)
        return StoredRows(record, None, None)

    def _shard(self, stored: Array, shape: tuple[int, ...], first: int, layout: RecordLayout) -> Array:
        """Return this rank's shard of an unsharded stored tensor, according to the dims of the live tensor.

        Axes before ``first`` are rows. Raises LookupError if the shapes do not match.
        """
        if self._is_partial(layout):
            raise LookupError("a partial sum of one rank")
        text = self._dims_of(layout)
        if stored.shape[first:] == shape[first:]:
            return stored
        misfit = f"shape {_shape(shape)}, recorded {_shape(stored.shape)}"
        if text is None or stored.ndim != len(shape):
            raise LookupError(misfit)
        try:
            parsed = dims.parse(text)
        except DimsError as error:
            raise LookupError(str(error)) from None
        skew = parsed.ndim - len(shape)  # a two-axis token grid is flattened to one axis here
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

    def _is_partial(self, layout: RecordLayout) -> bool:
        """Return whether the live tensor is a partial sum of this rank, while the reference has the full sum."""
        if not self._may_be_partial or (text := self._dims_of(layout)) is None:
            return False
        try:
            partial = [shard.axis for _, shard in dims.parse(text).shards() if shard.partial]
        except DimsError:
            return False
        return any(self._info.mesh.get(axis, 1) > 1 for axis in partial)


def array_at(address: int, layout: RecordLayout) -> Array:
    """View a contiguous tensor in host memory as an array; the memory must stay valid while the array is used."""
    memory: Any = (ctypes.c_ubyte * layout.nbytes).from_address(address) if layout.nbytes else b""
    return np.ndarray(layout.shape, dtypes.numpy_dtype(layout.dtype), memory)


def copied_array(tensor: torch.Tensor, layout: RecordLayout) -> Array:
    """Copy any other tensor to contiguous host memory, as an array."""
    dense = local_tensor(tensor).cpu().contiguous()
    raw = dense.reshape(-1).view(torch.uint8).numpy() if layout.nbytes else b""
    return np.ndarray(layout.shape, dtypes.numpy_dtype(layout.dtype), raw)


def _aligned(stored: Array, live: Array, num_axes: int | None) -> Strip:
    """Pair two contiguous tensors of equal shape row by row; ``num_axes`` is the number of leading row axes."""
    shape = _matrix_shape(stored.shape, num_axes)
    left, right = stored.reshape(shape), live.reshape(shape)
    if left.dtype in library.CODES_BY_TYPE and right.dtype in library.CODES_BY_TYPE:
        return Strip(left, right)
    return checked(left, right, None, None)


@lru_cache(1024)
def _matrix_shape(shape: tuple[int, ...], num_axes: int | None) -> tuple[int, int]:
    if num_axes is None:
        num_axes = max(0, len(shape) - 1)
    return math.prod(shape[:num_axes]), math.prod(shape[num_axes:])


def _matrix(array: Array, num_axes: int | None = None) -> Array:
    """Reshape to [rows, width]: rows are the first axis if ``num_axes`` is given, otherwise all axes but the last."""
    if array.ndim == 0:
        return array.reshape(1, 1)
    if num_axes is None:
        return array.reshape(-1, array.shape[-1])
    return np.ascontiguousarray(array).reshape(array.shape[0], -1)


def _shape(shape: Any) -> str:
    return "×".join(map(str, shape)) or "scalar"
