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
_LOOK_S = 1.0  # how often a caller that waits checks whether the device still makes progress
_DTYPES = {torch.int64: "int64", torch.int32: "int32", torch.bool: "bool"}


class LateRows:
    """Copies the tensors of a call to the host; until they have arrived, :attr:`outline` is used."""

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
        """Start the copies; ``complete`` makes the step of the outline and the values.

        It is called once for each step whose values arrive, in the order of the steps, in the worker's thread; what it
        raises is passed to ``failed``. Raises as :meth:`D2HWorker.start`.
        """
        self.outline = outline
        """What is known before the values arrive."""
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
        """Whether the values tell which rows there are, not only their tokens."""
        self.keys: torch.Tensor | None = None
        """Of the rows, for sketches on the device, see device_row_keys.py; valid in one stream."""
        self.keys_stream = 0
        for name, tensor in tensors.items():
            self._start(name, tensor)

    @property
    def is_ready(self) -> bool:
        """Whether :attr:`info` is complete."""
        return self._has_arrived.is_set() or self._worker.is_overdue

    @property
    def info(self) -> StepInfo:
        """The step with its rows, or its outline when the device failed. Valid once :attr:`is_ready`."""
        with self._lock:
            self._info = self._info or self.outline
            return self._info

    def wait(self) -> None:
        """Wait until it :attr:`is_ready`: for a caller that needs the rows while the step runs."""
        self._worker.hurry()
        while not self._has_arrived.wait(_LOOK_S):
            if self._worker.is_overdue or not self._worker.staging.num_pending:  # nothing will come
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
        came = False

        def arrived(_: bytes) -> bool:
            nonlocal came
            came = True
            return False

        def done(_: PayloadSlot) -> None:
            self._arrived(name, values, is_whole=came)

        # The thread that waits for it should not take the interpreter from the forward that begins
        self._worker.start(tensor, layout, slot, done, arrived, can_wait=True)

    def _arrived(self, name: str, values: Array, *, is_whole: bool) -> None:
        """The values of a tensor are here, or will not come; with the last of them, complete the step."""
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
            except Exception as error:  # noqa: BLE001 - values of an unknown model; the thread has to go on
                self._failed(error)
        with self._lock:
            self._info = self._info or info
        self._values.clear()
        self._has_arrived.set()
