"""Wakeup: wakes a thread that waits for a ZeroMQ socket."""

import contextlib
import math
import os
from typing import Any

import zmq


class Wakeup:
    """An eventfd polled together with one socket; any thread may signal it."""

    def __init__(self, socket: "zmq.Socket[Any]") -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._fd, zmq.POLLIN)

    def notify(self) -> None:
        """Wake the thread that waits, or will wait next; may be called from a signal handler and after closing."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._fd, 1)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a message or a wakeup; False on timeout."""
        met = dict(self._poller.poll(math.ceil(timeout_s * 1000)))
        if self._fd in met:
            os.eventfd_read(self._fd)
        return bool(met)

    def close(self) -> None:
        """Close the eventfd."""
        os.close(self._fd)
