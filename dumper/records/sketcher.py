"""Sketcher: compute the sketches of tensors that are recorded without their values."""

import ctypes
import json
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from tapscope.core.observe import StepInfo
from tapscope.dumper.records.inflight_record import InflightRecord, PendingCopy
from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.records.record_layout import RecordLayout
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.kernels.native import sketch
from tapscope.run_format.sketch import (
    COUNTERS,
    NBYTES,
    RowKeys,
    SketchIndex,
    record_member,
    row_keys,
    sketch_index,
)

Array = np.ndarray[tuple[int], np.dtype[np.float32]]

SKETCH_LAYOUT = RecordLayout("", "float32", [COUNTERS], COUNTERS, NBYTES)
"""Layout of a stored sketch."""
_MAX_INDICES = 4096
_MAX_SLOTS = 1024  # maximum number of slots of a place that is cached for later steps


class DevicePlace(NamedTuple):
    """Mapping from a local tensor to the unsharded one, for a device that has the hash keys of the step's rows."""

    by_rows: bool
    """See :attr:`.SketchIndex.by_rows`."""
    slot: int
    """Slot of the first row in the step's grid; further rows follow consecutively unless ``slots`` is set."""
    part: tuple[int, int, int, int, int]
    """Rows, columns, and the run of columns, see :class:`tapscope.kernels.triton.sketch.Part`."""
    slots: torch.Tensor | None = None
    """[rows] int64 on the host: slots of rows that are not consecutive, e.g. the rows of prompt logits."""


class Sketcher:
    """Computes sketch indices, and caches them by step, layout and mesh."""

    def __init__(self, report: Callable[[str, str, OpenStep], None]) -> None:
        """``report`` is called with (site, reason, step) once per site whose tensors cannot be sketched."""
        self._report = report
        self._mesh: Mapping[str, int] = {}
        self._coords: Mapping[str, int] = {}
        self._current: tuple[StepInfo | None, RowKeys | None, dict[str, SketchIndex | str]] = (None, None, {})
        self._without_rows: dict[str, SketchIndex | str] = {}
        self._reported: set[str] = set()
        self._places: dict[tuple[tuple[int, ...], str], DevicePlace | None] = {}
        self.is_wanted = False
        """Whether any rule requests sketches."""

    def place(self, mesh: Mapping[str, int], coords: Mapping[str, int], *, is_wanted: bool) -> None:
        """Set the mesh and this rank's coordinates, and whether any rule requests sketches; clears the caches."""
        self.is_wanted = is_wanted
        self._places.clear()
        self._mesh, self._coords = dict(mesh), dict(coords)
        self._current = (None, None, {})
        self._without_rows.clear()

    def index(self, port: SitePort, step: OpenStep, layout: RecordLayout) -> SketchIndex | None:
        """Return the sketch index of a tensor; None if it cannot be sketched, which is reported once per site."""
        keys, known = self._known(port, step)
        index = known.get(layout.members)
        if index is None:
            if len(known) >= _MAX_INDICES:
                known.clear()
            index = known[layout.members] = self._find(layout, keys)
        if isinstance(index, SketchIndex):
            return index
        if port.site not in self._reported:
            self._reported.add(port.site)
            self._report(port.site, f"kept as statistics, without a sketch: {index}", step)
        return None

    def place_on_device(self, port: SitePort, step: OpenStep, layout: RecordLayout) -> DevicePlace | None:
        """Return the index of a tensor in the form for devices, without row keys.

        Returns None if the tensor cannot be sketched, or only on the host.
        """
        grid = () if _is_stored(port) else grid_of(step.info)
        key = grid, layout.members
        if key not in self._places:
            if len(self._places) >= _MAX_INDICES:
                self._places.clear()
            place = self._find_place(layout, grid)
            if place is not None and place.slots is not None and len(place.slots) > _MAX_SLOTS:
                return place  # not cached: large and specific to this step, e.g. for sorted (token, expert) pairs
            self._places[key] = place
        return self._places[key]

    def _find_place(self, layout: RecordLayout, grid: tuple[int, ...]) -> DevicePlace | None:
        slots = math.prod(grid)
        keys = RowKeys(grid, np.arange(slots, dtype=np.uint32), np.ones(slots, bool)) if grid else None
        index = self._find(layout, keys)
        if not isinstance(index, SketchIndex) or len(index.runs) != 1 or not len(index.rows):
            return None
        part = len(index.rows), index.width, *index.runs[0].tolist()
        if not index.by_rows:
            return DevicePlace(False, 0, part)
        first = int(index.keys[0])
        if np.array_equal(index.keys, np.arange(first, first + len(index.keys))):
            return DevicePlace(True, first, part)
        return DevicePlace(True, 0, part, torch.from_numpy(index.keys.astype(np.int64)))

    def _known(self, port: SitePort, step: OpenStep) -> tuple[RowKeys | None, dict[str, SketchIndex | str]]:
        """Return the hash keys of the step's rows, and the cache of indices by layout."""
        if _is_stored(port):
            return None, self._without_rows
        late = step.late_rows
        info = late.info if late is not None and late.is_ready else step.info
        current = self._current
        if current[0] is not info:
            self._current = current = info, row_keys(info), {}
        return current[1:]

    def _find(self, layout: RecordLayout, keys: RowKeys | None) -> SketchIndex | str:
        if not sketch.can_sketch(layout.dtype):
            return f"tensors of {layout.dtype} have no sketch"
        about = json.loads("{" + layout.members[1:] + "}")
        slots = about.get("rows")
        if about.get("slice") is not None and slots is None:
            return "a part of it was captured, and its token rows are unknown"
        return sketch_index(
            layout.shape, keys, dims=about.get("dims"), slots=slots, mesh=self._mesh, coords=self._coords
        )


def grid_of(info: StepInfo) -> tuple[int, ...]:
    """Return the grid of a step's token rows; empty if the rows are unknown."""
    return tuple(info.grid) if info.rows else ()


def _is_stored(port: SitePort) -> bool:
    """Return whether ``port`` is a parameter or buffer, which have no token rows."""
    return port.site.rpartition(":")[2].startswith(("param[", "buffer["))


def counters_at(address: int) -> Array:
    """Copy the 256 float32 counters at a host address."""
    return np.frombuffer(ctypes.string_at(address, NBYTES), np.float32)


def take(tensor: torch.Tensor, layout: RecordLayout, index: SketchIndex) -> Array:
    """Compute the sketch of a strided tensor in host memory: [256] float32."""
    dense = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
    return sketch.sketch(dense.data_ptr(), layout.dtype, index)


def write(counters: Array, slot: PayloadSlot) -> None:
    """Copy sketch counters into a slot."""
    counters = np.ascontiguousarray(counters, np.float32)
    ctypes.memmove(slot.address, counters.ctypes.data, NBYTES)


class SketchCopy:
    """Pending device copy of a tensor of which only a sketch is stored (:class:`~.inflight_record.PendingCopy`)."""

    def __init__(self, cancel: Callable[[PayloadSlot], None]) -> None:
        """``cancel`` frees the slot of a tensor that cannot be sketched."""
        self._cancel = cancel
        self.ahead_of: OpenStep | None = None
        """Step whose preliminary rows are sketched; the sketch is dropped if the final rows, known when the record is
        sent, differ."""
        self.place = 0
        """Offset of the counters from the statistics, if a CUDA graph replay computed both; else 0."""
        self.inner: PendingCopy | None = None
        """Copy of the statistics, and of the bytes or the counters."""
        self.taken: tuple[bool, Array] | None = None
        """(whether token rows are known, counters) once copied; None if the tensor cannot be sketched."""

    @property
    def is_ready(self) -> bool:
        """See :class:`PendingCopy`."""
        return self.inner is None or self.inner.is_ready

    def finish(self, record: InflightRecord) -> None:
        """Complete the record with statistics and sketch; raises CopyFailed."""
        slot, record.slot = record.slot, None
        try:
            assert self.inner is not None
            self.inner.finish(record)
        finally:
            record.slot = slot
        assert slot is not None
        if self.taken is None or (self.ahead_of is not None and self.ahead_of.has_other_rows):
            record.slot = record.payload = None
            self._cancel(slot)
            return
        by_rows, counters = self.taken
        record.content += record_member(by_rows, counters)
        write(counters, slot)

    def discard(self, slot: PayloadSlot, free: Callable[[PayloadSlot], None]) -> None:
        """Discard the record: call ``free`` on its slot."""
        free(slot)
