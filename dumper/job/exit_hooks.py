"""Exit hooks: write the flight recorder when the process exits, or on a signal.

Installed once per process while any dumper holds steps in memory: ``sys.excepthook``, an ``atexit`` function, and a
signal handler that only requests a release. Signal handler and ``sys.excepthook`` call the previous handler.
"""

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import weakref
from types import FrameType, TracebackType
from typing import Any, Protocol

_log = logging.getLogger("tapscope")
_DRAIN_S = 5.0
"""Maximum time in seconds that the exit of the process waits until released steps are written."""


class StepHolder(Protocol):
    """An object that holds steps in memory, i.e. a flight recorder."""

    def request_release(self, reason: str) -> None:
        """Request a release of the steps; returns immediately."""
        ...

    def flush_at_exit(self, reason: str, timeout_s: float) -> None:
        """Release the steps, and wait up to ``timeout_s`` seconds until they are written."""
        ...


class _ExitHooks:
    """The exit hooks of this process and the step holders that they flush."""

    def __init__(self) -> None:
        self._holders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._numbers: dict[int, Any] = {}  # signal -> previous handler
        self._before: Any = None
        self._lock = threading.RLock()

    def add(self, holder: StepHolder, name: str | None) -> None:
        with self._lock:
            if not self._holders:
                self._before, sys.excepthook = sys.excepthook, self._on_exception
                atexit.register(self._on_exit)
            self._holders.add(holder)
            if name is not None:
                self._listen(signal.Signals[name])

    def remove(self, holder: StepHolder) -> None:
        with self._lock:
            self._holders.discard(holder)
            if self._holders:
                return
            if sys.excepthook == self._on_exception:
                sys.excepthook = self._before
            atexit.unregister(self._on_exit)
            for number, before in list(self._numbers.items()):
                if signal.getsignal(number) == self._on_signal:
                    with contextlib.suppress(ValueError):  # not the main thread: the handler stays, without effect
                        signal.signal(number, before)
                        del self._numbers[number]

    def disown(self) -> None:
        """Drop all holders and remove the hooks, without taking a lock."""
        self._holders = weakref.WeakSet()
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._before
        atexit.unregister(self._on_exit)

    def _listen(self, number: signal.Signals) -> None:
        if signal.getsignal(number) == self._on_signal:
            return
        try:
            self._numbers[number] = signal.signal(number, self._on_signal)
        except (ValueError, OSError) as error:
            text = "tapscope: %s does not release the flight recorder here (%s); use the HTTP control or release()"
            _log.warning(text, number.name, error)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        for holder in list(self._holders):
            holder.request_release(f"signal {signal.Signals(number).name}")
        before = self._numbers.get(number)
        if callable(before):
            before(number, frame)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._rescue(f"uncaught {kind.__name__}")
        self._before(kind, error, trace)

    def _on_exit(self) -> None:
        self._rescue("the process ends")

    def _rescue(self, reason: str) -> None:
        for holder in list(self._holders):
            try:
                holder.flush_at_exit(reason, _DRAIN_S)
            except Exception as failure:  # noqa: BLE001 - the process exits in any case
                _log.warning("tapscope: the flight recorder was not written: %s", failure)


_exits = _ExitHooks()


def _after_fork() -> None:
    """Remove inherited hooks in a forked child: held steps belong to the parent, whose locks may be in any state."""
    global _exits
    inherited, _exits = _exits, _ExitHooks()
    inherited.disown()


os.register_at_fork(after_in_child=_after_fork)


def install(holder: StepHolder, name: str | None) -> None:
    """Flush ``holder`` when the process exits, and request a release on the signal ``name``, if given.

    Keeps only a weak reference. A signal handler can only be installed in the main thread; other threads log a warning.
    """
    _exits.add(holder, name)


def uninstall(holder: StepHolder) -> None:
    """Remove ``holder``, which holds no steps any more; removing the last one restores the previous handlers."""
    _exits.remove(holder)
