"""Arrivals: values on their way from a device, and the drain that brings them."""

import threading

import torch

from tapscope.dumper.device.d2h_worker import Drain
from tapscope.dumper.device.device import Cuda
from tapscope.dumper.pipeline.send_queue import Backlog
from tapscope.dumper.retention.step_counters import Account


class Arrivals:
    """Makes the drain when the first value of a device comes, or before, where one is likely to."""

    def __init__(self, backlog: Backlog, account: Account) -> None:
        self._backlog = backlog
        self._account = account
        self._limit = 0
        self._lock = threading.Lock()
        self.opened: Drain | None = None

    def resize(self, limit: int, *, soon: bool) -> None:
        """At most ``limit`` bytes of clones on each device; ``soon`` if values are to come."""
        self._limit = limit
        if self.opened is not None:
            self.opened.resize(limit)
        elif soon and isinstance(self._backlog, Backlog) and _uses_cuda():
            self.drain().prepare()

    def drain(self) -> Drain:
        """The drain, which is there from now on."""
        if self.opened is None:
            with self._lock:
                if self.opened is None:
                    self.opened = Drain(Cuda(), self._backlog, self._limit, self._account.lose)
        return self.opened

    def end_step(self) -> dict[str, int]:
        """A step ends: its values shall come soon; gives metrics of it."""
        if self.opened is None:
            return {}
        self.opened.hurry()
        return {"num_direct_copies": self.opened.count_direct()}

    def close(self) -> None:
        """Wait for what is on its way, and let go of devices."""
        if self.opened is not None:
            self.opened.close()


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
