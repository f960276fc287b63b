"""Bell: wakes a thread that waits for a ZMQ socket."""

import contextlib
import math
import os
from typing import Any

import zmq


class Wakeup:
    """An eventfd that is polled together with one socket; any thread may ring it."""

    def __init__(self, socket: "zmq.Socket[Any]") -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._fd, zmq.POLLIN)

    def notify(self) -> None:
        """Wake who waits, or will wait next; also from a signal handler, and when nobody waits any more."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._fd, 1)

    def wait(self, timeout_s: float) -> bool:
        """Until a message has come or the bell was rung; False when the time is over first."""
        met = dict(self._poller.poll(math.ceil(timeout_s * 1000)))
        if self._fd in met:
            os.eventfd_read(self._fd)
        return bool(met)

    def close(self) -> None:
        """Nobody may ring any more."""
        os.close(self._fd)
