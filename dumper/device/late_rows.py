"""LateRows: the token rows of a step whose token ids are stored on a device."""

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
_DTYPES = {torch.int64: "int64", torch.int32: "int32", torch.bool: "bool"}


class LateRows:
    """Copies the tensors of a call to the host; until they have arrived, :attr:`outline` is used."""

    def __init__(
        self,
        worker: "D2HWorker",
        tensors: Mapping[str, torch.Tensor],
        outline: StepInfo,
        complete: Complete,
        *,
        rows_are_late: bool = False,
    ) -> None:
        """Start the copies; ``complete`` makes the step of the outline and the values. Raises as
        :meth:`D2HWorker.start`."""
        self.outline = outline
        """What is known before the values arrive."""
        self._worker = worker
        self._complete = complete
        self._values: dict[str, Array] = {}
        self._lock = threading.Lock()
        self._num_left = len(tensors)
        self._has_failed = False
        self._info: StepInfo | None = None
        self.rows_are_late = rows_are_late
        """Whether the values tell which rows there are, not only their tokens."""
        self.keys: torch.Tensor | None = None
        """Of the rows, for sketches on the device, see device_row_keys.py; valid in one stream."""
        self.keys_stream = 0
        for name, tensor in tensors.items():
            self._start(name, tensor)

    @property
    def is_ready(self) -> bool:
        """Whether :attr:`info` is complete."""
        return self._num_left == 0 or self._worker.is_overdue

    @property
    def info(self) -> StepInfo:
        """The step with its rows, or its outline when the device failed. Valid once :attr:`is_ready`."""
        if self._info is None:
            is_whole = self._num_left == 0 and not self._has_failed
            self._info = self._complete(self.outline, self._values) if is_whole else self.outline
        return self._info

    def _start(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dtype not in _DTYPES:
            tensor = tensor.long()
        dtype = _DTYPES[tensor.dtype]
        values = np.zeros(tuple(tensor.shape), dtype)
        if not values.size:
            self._values[name] = values
            self._num_left -= 1
            return
        slot = PayloadSlot(values.ctypes.data, values.nbytes, -1, None)
        layout = RecordLayout("", dtype, list(values.shape), values.size, values.nbytes)
        came = False

        def arrived(_: bytes) -> bool:
            nonlocal came
            came = True
            return False

        def done(_: PayloadSlot) -> None:
            with self._lock:
                self._values[name] = values
                self._has_failed = self._has_failed or not came
                self._num_left -= 1

        # The thread that waits for it should not take the interpreter from the forward that begins
        self._worker.start(tensor, layout, slot, done, arrived, can_wait=True)
