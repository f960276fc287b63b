"""StagingBudget: accounting of pending copies, and the limit on device memory for staging clones."""

import logging
import threading
import time

_log = logging.getLogger("tapscope")
MAX_DIRECT_BYTES = 64 * 1024
"""Copies up to this size run in the model's own stream, which is faster than a clone, unless larger copies are
pending."""


class StagingBudget:
    """Limits the device memory of staging clones. Beyond the limit, a copy runs in the model's own stream.

    The model's threads count starting copies, under a lock; only the worker's thread counts completed copies.
    """

    def __init__(self, limit: int) -> None:
        """Set the limit of staging memory to ``limit`` bytes."""
        self.lock = threading.Lock()
        self.limit = limit
        self.oldest_since = 0.0
        """``time.monotonic()`` at which the oldest pending copy became the oldest one."""
        self._num_begun = self._num_done = 0
        self._bytes_begun = self._bytes_done = 0
        self._held_begun = self._held_done = 0
        self._num_direct = 0
        self._has_warned = False

    def begin(self, nbytes: int) -> int:
        """Count a starting copy of ``nbytes``; returns the bytes of the permitted staging clone, 0 for no clone."""
        with self.lock:
            if self._num_begun == self._num_done:
                self.oldest_since = time.monotonic()
            held = self.held_bytes
            is_small = nbytes <= MAX_DIRECT_BYTES and held <= MAX_DIRECT_BYTES
            clone = 0 if is_small or held + nbytes > self.limit else nbytes
            self._num_begun += 1
            self._bytes_begun += nbytes
            self._held_begun += clone
            return clone

    def fail(self, nbytes: int, clone: int) -> None:
        """Undo :meth:`begin` for a copy that could not be started; ``clone`` is the result of :meth:`begin`."""
        with self.lock:
            self._num_begun -= 1
            self._bytes_begun -= nbytes
            self._held_begun -= clone

    def update(self, nbytes: int, clone: int, held_bytes: int, *, ran_out: bool) -> None:
        """Correct the accounting of a started copy that actually holds ``held_bytes`` instead of ``clone``.

        ``ran_out``: the device had no memory for the clone, so the limit is lowered to the current usage.
        """
        if held_bytes == clone and (clone or nbytes <= MAX_DIRECT_BYTES):
            return
        with self.lock:
            self._held_begun += held_bytes - clone
            self._num_direct += not held_bytes
            if ran_out:  # leave the remaining device memory to the model
                self.limit = min(self.limit, self.held_bytes)
        if not self._has_warned and not held_bytes:
            self._has_warned = True
            why = f"device_staging_bytes={self.limit} are in use, or the device has little memory left"
            text = "tapscope: %s: values are copied in the model's own stream, which slows it down; nothing is lost"
            _log.warning(text, why)

    def done(self, nbytes: int, held_bytes: int) -> None:
        """Count a completed copy whose clone has been freed."""
        self.oldest_since = time.monotonic()
        self._held_done += held_bytes
        self._bytes_done += nbytes
        self._num_done += 1

    def take_num_direct(self) -> int:
        """Return the number of copies above MAX_DIRECT_BYTES that ran in the model's own stream since the last call."""
        with self.lock:
            number, self._num_direct = self._num_direct, 0
            return number

    @property
    def held_bytes(self) -> int:
        """Device memory of staging clones in bytes."""
        return self._held_begun - self._held_done

    @property
    def num_pending(self) -> int:
        """Number of copies that have not completed."""
        return self._num_begun - self._num_done

    @property
    def pending_bytes(self) -> int:
        """Number of bytes whose copies have not completed."""
        return self._bytes_begun - self._bytes_done
