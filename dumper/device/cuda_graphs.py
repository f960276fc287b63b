"""CUDA graphs of the process: captures in progress, and callbacks around every replay.

Hooks do not run when a graph is replayed. Therefore, while a Dumper is open, the ``torch.cuda.CUDAGraph`` methods that
begin, end and replay a capture are wrapped. Taps that fire during a capture add their state to a :class:`GraphCapture`,
which is stored on the graph and notified of every replay. This covers graphs created by the user
(``torch.cuda.graph``, ``make_graphed_callables``), by ``torch.compile`` and by serving engines. For a graph without
taps, a wrapper costs one attribute lookup.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from tapscope.dumper.device.capture_mode import RELAXED, exchange_capture_mode
from tapscope.kernels.native import library

_log = logging.getLogger("tapscope")
_ATTRIBUTE = "_tapscope_capture"
_METHODS = ("capture_begin", "capture_end", "replay", "reset")
_local = threading.local()
_lock = threading.Lock()
_originals: dict[str, Any] = {}
_wrappers: dict[str, Any] = {}
_num_users = 0
num_captures = 0
"""Number of captures in progress in any thread, for a cheap check before :func:`current`."""
num_unknown_replays = 0
"""Number of replays of graphs that were captured while no Dumper was open."""


class Recorded(Protocol):
    """State that one owner recorded during a capture, with callbacks around replays."""

    def finish(self) -> None:
        """Called before the capture ends, while its stream is the current one."""
        ...

    def before_replay(self) -> None:
        """Called before the graph is launched on the current stream."""
        ...

    def after_replay(self) -> None:
        """Called after the graph was launched on the current stream."""
        ...


class GraphCapture:
    """State that taps recorded during the capture of one graph, by owner."""

    def __init__(self) -> None:
        self._parts: dict[Any, Recorded] = {}

    def part(self, owner: Any, make: Callable[[], Any]) -> Any:
        """Return the part of ``owner``, created by ``make`` on the first call."""
        recorded = self._parts.get(owner)
        if recorded is None:
            recorded = self._parts[owner] = make()
        return recorded

    def __bool__(self) -> bool:
        return bool(self._parts)

    def finish(self) -> None:
        """Notify all parts that the capture or rehearsal is about to end."""
        for part in self._parts.values():
            part.finish()

    def replayed(self, launch: Callable[[], Any]) -> Any:
        """Call ``launch``, which replays the graph, between the callbacks of all parts; returns its result."""
        for part in self._parts.values():
            part.before_replay()
        result = launch()
        for part in self._parts.values():
            part.after_replay()
        return result


def current() -> GraphCapture | None:
    """Return the innermost capture or rehearsal that this thread is in; None if there is none."""
    stack = getattr(_local, "stack", None)
    return stack[-1] if stack else None


@contextmanager
def rehearsal() -> Iterator[None]:
    """Context manager for warm-up: firings are treated as if inside a capture, whose graph is then discarded."""
    capture = GraphCapture()
    _enter(capture)
    try:
        yield
    finally:
        capture.finish()
        _leave()


def _enter(capture: GraphCapture) -> None:
    global num_captures
    stack = getattr(_local, "stack", None)
    if stack is None:
        stack = _local.stack = []
    stack.append(capture)
    with _lock:
        num_captures += 1
        _notify_fast_paths(num_captures)


def _leave() -> None:
    global num_captures
    stack = getattr(_local, "stack", None)
    if stack:
        stack.pop()
        with _lock:
            num_captures -= 1
            _notify_fast_paths(num_captures)


def _notify_fast_paths(number: int) -> None:
    """Pass the number of captures in progress to the C++ fast paths, which decline firings during a capture."""
    if (functions := library.functions()) is not None:
        functions.set_captures(number)


# ---- The wrappers


def watch() -> None:
    """Wrap the methods of ``torch.cuda.CUDAGraph``. Calls are counted; each needs a matching :func:`unwatch`."""
    global _num_users
    with _lock:
        _num_users += 1
        if _num_users > 1 or torch.version.cuda is None:
            return
        for name in _METHODS:
            _originals[name] = getattr(torch.cuda.CUDAGraph, name)
            _wrappers[name] = _wrapper_of(name, _originals[name])
            setattr(torch.cuda.CUDAGraph, name, _wrappers[name])


def unwatch() -> None:
    """Restore the original methods after the last user, except methods that other code has wrapped since."""
    global _num_users
    with _lock:
        _num_users -= 1
        if _num_users:
            return
        for name, wrapper in _wrappers.items():
            if getattr(torch.cuda.CUDAGraph, name) is wrapper:
                setattr(torch.cuda.CUDAGraph, name, _originals[name])
        _wrappers.clear()
        _originals.clear()


def _wrapper_of(name: str, original: Any) -> Any:
    wrapped = _AROUND[name]

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapped(self, lambda: original(self, *args, **kwargs))

    method.__name__ = name
    method.__doc__ = original.__doc__
    return method


def _begin(graph: Any, call: Callable[[], Any]) -> Any:
    graph.__dict__.pop(_ATTRIBUTE, None)
    result = call()
    _enter(GraphCapture())
    graph.__dict__["_tapscope_open"] = True
    return result


def _end(graph: Any, call: Callable[[], Any]) -> Any:
    capture = current()
    if graph.__dict__.pop("_tapscope_open", False):
        if capture is not None:
            capture.finish()
        _leave()
    result = call()
    graph.__dict__[_ATTRIBUTE] = capture or None
    return result


def _replay(graph: Any, call: Callable[[], Any]) -> Any:
    global num_unknown_replays
    known = graph.__dict__
    capture = known.get(_ATTRIBUTE)
    if capture is None:
        num_unknown_replays += _ATTRIBUTE not in known
        return call()
    return capture.replayed(call)


def _reset(graph: Any, call: Callable[[], Any]) -> Any:
    if graph.__dict__.pop("_tapscope_open", False):  # a capture that failed
        _leave()
    graph.__dict__.pop(_ATTRIBUTE, None)
    return call()


_AROUND = {"capture_begin": _begin, "capture_end": _end, "replay": _replay, "reset": _reset}


# ---- Capture modes of the driver


@contextmanager
def relaxed() -> Iterator[None]:
    """Context manager: let this thread allocate memory and load kernels during a graph capture of any thread.

    Without it, the driver would invalidate the capture.
    """
    before = exchange_capture_mode(RELAXED)
    try:
        yield
    finally:
        if before is not None:
            exchange_capture_mode(before)
