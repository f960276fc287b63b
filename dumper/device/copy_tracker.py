"""Arrivals: values on their way from a device, and the drain that brings them."""

import threading

import torch

from tapscope.dumper.device.d2h_worker import D2HWorker
from tapscope.dumper.device.device import CudaDevice
from tapscope.dumper.pipeline.send_queue import SendQueue
from tapscope.dumper.retention.step_counters import StepCounters


class CopyTracker:
    """Makes the drain when the first value of a device comes, or before, where one is likely to."""

    def __init__(self, queue: SendQueue, counters: StepCounters) -> None:
        self._backlog = queue
        self._account = counters
        self._limit = 0
        self._lock = threading.Lock()
        self.running: D2HWorker | None = None

    def resize(self, limit: int, *, soon: bool) -> None:
        """At most ``limit`` bytes of clones on each device; ``soon`` if values are to come."""
        self._limit = limit
        if self.running is not None:
            self.running.resize(limit)
        elif soon and isinstance(self._backlog, SendQueue) and _uses_cuda():
            self.worker().prepare()

    def worker(self) -> D2HWorker:
        """The drain, which is there from now on."""
        if self.running is None:
            with self._lock:
                if self.running is None:
                    self.running = D2HWorker(CudaDevice(), self._backlog, self._limit, self._account.count_lost_copy)
        return self.running

    def end_step(self) -> dict[str, int]:
        """A step ends: its values shall come soon; gives metrics of it."""
        if self.running is None:
            return {}
        self.running.end_nap()
        return {"num_direct_copies": self.running.take_num_direct()}

    def close(self) -> None:
        """Wait for what is on its way, and let go of devices."""
        if self.running is not None:
            self.running.close()


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
