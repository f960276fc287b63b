"""LateRows: the token rows of a step whose token ids are still on a device."""

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tapscope.core.observe import StepInfo
from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.records.record_layout import RecordLayout

if TYPE_CHECKING:
    from tapscope.dumper.device.d2h_worker import D2HWorker

Array = np.ndarray[Any, Any]
Complete = Callable[[StepInfo, Mapping[str, Array]], StepInfo]
_LOOK_S = 1.0  # interval at which wait() checks whether the device still makes progress
_DTYPES = {torch.int64: "int64", torch.int32: "int32", torch.bool: "bool"}


class LateRows:
    """Copies a call's tensors to the host and completes the step from them; until then :attr:`outline` applies."""

    def __init__(
        self,
        worker: "D2HWorker",
        tensors: Mapping[str, torch.Tensor],
        outline: StepInfo,
        complete: Complete,
        failed: Callable[[Exception], None],
        *,
        rows_are_late: bool = False,
    ) -> None:
        """Start copying ``tensors``; ``complete(outline, values)`` returns the step once all values have arrived.

        ``complete`` is called at most once, in the worker's thread, in the order of the steps; its exceptions are
        passed to ``failed``. Raises as :meth:`D2HWorker.start`.
        """
        self.outline = outline
        """The step as known before the values arrive."""
        self._worker = worker
        self._complete = complete
        self._failed = failed
        self._values: dict[str, Array] = {}
        self._lock = threading.Lock()
        self._num_left = len(tensors)
        self._has_failed = False
        self._has_arrived = threading.Event()
        self._info: StepInfo | None = None
        self.rows_are_late = rows_are_late
        """Whether the values determine the rows themselves, not only their token ids."""
        self.keys: torch.Tensor | None = None
        """Row keys for sketches on the device, see device_row_keys.py; valid in the stream :attr:`keys_stream`."""
        self.keys_stream = 0
        for name, tensor in tensors.items():
            self._start(name, tensor)

    @property
    def is_ready(self) -> bool:
        """Whether :attr:`info` is final."""
        return self._has_arrived.is_set() or self._worker.is_overdue

    @property
    def info(self) -> StepInfo:
        """The step with its rows, or the outline when the device failed. Valid once :attr:`is_ready`."""
        with self._lock:
            self._info = self._info or self.outline
            return self._info

    def wait(self) -> None:
        """Wait until :attr:`is_ready`, or until no copy is pending; for callers that need the rows during the step."""
        self._worker.hurry()
        while not self._has_arrived.wait(_LOOK_S):
            if self._worker.is_overdue or not self._worker.staging.num_pending:  # the values will never arrive
                return

    def _start(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dtype not in _DTYPES:
            tensor = tensor.long()
        dtype = _DTYPES[tensor.dtype]
        values = np.zeros(tuple(tensor.shape), dtype)
        if not values.size:
            self._arrived(name, values, is_whole=True)
            return
        slot = PayloadSlot(values.ctypes.data, values.nbytes, -1, None)
        layout = RecordLayout("", dtype, list(values.shape), values.size, values.nbytes)
        has_arrived = False

        def arrived(_: bytes) -> bool:
            nonlocal has_arrived
            has_arrived = True
            return False

        def done(_: PayloadSlot) -> None:
            self._arrived(name, values, is_whole=has_arrived)

        # can_wait: do not wake the worker's thread, which would compete for the GIL with the forward that begins
        self._worker.start(tensor, layout, slot, done, arrived, can_wait=True)

    def _arrived(self, name: str, values: Array, *, is_whole: bool) -> None:
        """Store the values of one tensor, and complete the step after the last one.

        ``is_whole`` False means that the values will never arrive.
        """
        with self._lock:
            self._values[name] = values
            self._has_failed = self._has_failed or not is_whole
            self._num_left -= 1
            if self._num_left:
                return
        info = self.outline
        if not self._has_failed:
            try:
                info = self._complete(self.outline, self._values)
            except Exception as error:  # noqa: BLE001 - arguments of an arbitrary model; the thread must survive
                self._failed(error)
        with self._lock:
            self._info = self._info or info
        self._values.clear()
        self._has_arrived.set()
