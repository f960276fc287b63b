"""BufferPool: reusable buffers for payloads that are sent inside messages."""

import threading
from collections import OrderedDict
from typing import Any

import numpy as np

Buffer = np.ndarray[Any, np.dtype[np.uint8]]


class BufferPool:
    """Pool of reusable buffers; fresh memory costs a page fault per 4 KiB, which is slower than the copy itself.

    ``limit`` bounds the bytes of lent and idle buffers: idle buffers are freed before more memory is allocated, least
    recently used sizes first. The caller must bound the lent bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._idle_bytes = 0
        self._lent_bytes = 0
        self._idle: OrderedDict[int, list[Buffer]] = OrderedDict()
        self._lock = threading.Lock()

    def resize(self, limit: int) -> None:
        """Change the limit, in bytes."""
        with self._lock:
            self._limit = limit
            self._trim()

    def acquire(self, nbytes: int) -> Buffer:
        """Return a buffer of exactly ``nbytes`` bytes with undefined content."""
        with self._lock:
            self._lent_bytes += nbytes
            idle = self._idle.get(nbytes)
            if idle:
                self._idle.move_to_end(nbytes)
                self._idle_bytes -= nbytes
                return idle.pop()
            self._trim()
        return np.empty(nbytes, np.uint8)

    def release(self, buffer: Buffer) -> None:
        """Return a buffer to the pool for reuse."""
        with self._lock:
            self._lent_bytes -= buffer.nbytes
            if buffer.nbytes:
                self._idle.setdefault(buffer.nbytes, []).append(buffer)
                self._idle.move_to_end(buffer.nbytes)
                self._idle_bytes += buffer.nbytes
                self._trim()

    @property
    def held_bytes(self) -> int:
        """Number of bytes in lent and idle buffers."""
        return self._lent_bytes + self._idle_bytes

    def _trim(self) -> None:
        while self._idle and self._lent_bytes + self._idle_bytes > self._limit:
            nbytes, buffers = next(iter(self._idle.items()))
            if buffers:
                buffers.pop()
                self._idle_bytes -= nbytes
            else:
                del self._idle[nbytes]
