"""Sketcher: the sketches of tensors that are recorded without their values."""

import ctypes
import json
import zlib
from collections.abc import Callable, Mapping

import numpy as np
import torch

from tapscope.core.observe import StepInfo
from tapscope.dumper.records.inflight_record import InflightRecord, PendingCopy
from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.records.record_layout import RecordLayout
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.steps.open_step import OpenStep
from tapscope.kernels.native import sketch
from tapscope.run_format.sketch import COUNTERS, NBYTES, RowKeys, SketchIndex, row_keys, sketch_index

Array = np.ndarray[tuple[int], np.dtype[np.float32]]

SKETCH_LAYOUT = RecordLayout("", "float32", [COUNTERS], COUNTERS, NBYTES)
"""Of the stored counters."""
_MAX_INDICES = 4096


class Sketcher:
    """Takes sketches; what depends on the step, the layout and the mesh alone is computed once."""

    def __init__(self, report: Callable[[str, str, OpenStep], None]) -> None:
        """``report`` is called with (site, reason, step) for a site whose tensors have no sketch, once."""
        self._report = report
        self._mesh: Mapping[str, int] = {}
        self._coords: Mapping[str, int] = {}
        self._current: tuple[StepInfo | None, RowKeys | None, dict[str, SketchIndex | str]] = (None, None, {})
        self._without_rows: dict[str, SketchIndex | str] = {}
        self._reported: set[str] = set()

    def place(self, mesh: Mapping[str, int], coords: Mapping[str, int]) -> None:
        """Set this rank's place in the mesh."""
        self._mesh, self._coords = dict(mesh), dict(coords)
        self._current = (None, None, {})
        self._without_rows.clear()

    def index(self, port: SitePort, step: OpenStep, layout: RecordLayout) -> SketchIndex | None:
        """Where the elements of a tensor are in the whole one; None if it has no sketch, which is reported."""
        keys, known = self._known(port, step)
        found = known.get(layout.members)
        if found is None:
            if len(known) >= _MAX_INDICES:
                known.clear()
            found = known[layout.members] = self._find(layout, keys)
        if isinstance(found, SketchIndex):
            return found
        if port.site not in self._reported:
            self._reported.add(port.site)
            self._report(port.site, f"kept as statistics, without a sketch: {found}", step)
        return None

    def _known(self, port: SitePort, step: OpenStep) -> tuple[RowKeys | None, dict[str, SketchIndex | str]]:
        """The keys of the step's rows, and the known indices by layout."""
        if port.site.rpartition(":")[2].startswith(("param[", "buffer[")):
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


def take(tensor: torch.Tensor, layout: RecordLayout, index: SketchIndex) -> Array:
    """The counters of a dense tensor in host memory."""
    dense = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
    return sketch.sketch(dense.data_ptr(), layout.dtype, index)


def member(index: SketchIndex, counters: Array) -> bytes:
    """The member of the record line."""
    by_rows = b"true" if index.by_rows else b"false"
    return b',"sketch":{"by_rows":%b,"crc32":%d}' % (by_rows, zlib.crc32(counters.tobytes()))


def write(counters: Array, slot: PayloadSlot) -> None:
    """Copy the counters into a slot."""
    counters = np.ascontiguousarray(counters, np.float32)
    ctypes.memmove(slot.address, counters.ctypes.data, NBYTES)


class SketchCopy:
    """A tensor on its way from a device whose sketch alone is kept (:class:`~.inflight_record.PendingCopy`)."""

    def __init__(self, cancel: Callable[[PayloadSlot], None]) -> None:
        """``cancel`` frees the slot of a tensor that has no sketch."""
        self._cancel = cancel
        self.inner: PendingCopy | None = None
        """Brings the bytes and their statistics."""
        self.taken: tuple[SketchIndex, Array] | None = None
        """The sketch, once the bytes have arrived; None if the tensor has none."""

    @property
    def is_ready(self) -> bool:
        """See :class:`PendingCopy`."""
        return self.inner is None or self.inner.is_ready

    def finish(self, record: InflightRecord) -> None:
        """Complete the record; raises CopyFailed."""
        slot, record.slot = record.slot, None
        try:
            assert self.inner is not None
            self.inner.finish(record)
        finally:
            record.slot = slot
        assert slot is not None
        if self.taken is None:
            record.slot = record.payload = None
            self._cancel(slot)
            return
        index, counters = self.taken
        record.content += member(index, counters)
        write(counters, slot)

    def discard(self, slot: PayloadSlot, free: Callable[[PayloadSlot], None]) -> None:
        """The record is not sent."""
        free(slot)
