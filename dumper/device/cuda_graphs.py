"""CUDA graphs of the process: who is captured now, and what must happen around every replay.

Python does not run when a graph is replayed. So the methods of ``torch.cuda.CUDAGraph`` that begin and end a capture
and replay it are wrapped while a Dumper is open: taps that fire during a capture add what they need to a
:class:`GraphCapture`, which stays with the graph and is notified of every replay. That covers graphs of the user's own
(``torch.cuda.graph``, ``make_graphed_callables``), those of ``torch.compile`` and those of serving engines. The
wrappers cost an attribute lookup where a graph holds no taps.
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
"""Captures under way in any thread: a cheap first question."""
num_unknown_replays = 0
"""Replays of graphs that were captured while no Dumper was open."""


class Recorded(Protocol):
    """What one user of a capture has recorded."""

    def finish(self) -> None:
        """The capture is about to end; its stream is the current one."""
        ...

    def before_replay(self) -> None:
        """The graph is about to be launched on the current stream."""
        ...

    def after_replay(self) -> None:
        """The graph was launched."""
        ...


class GraphCapture:
    """What taps have recorded while one graph was captured."""

    def __init__(self) -> None:
        self._parts: dict[Any, Recorded] = {}

    def part(self, owner: Any, make: Callable[[], Any]) -> Any:
        """What ``owner`` has recorded, made by ``make`` the first time."""
        found = self._parts.get(owner)
        if found is None:
            found = self._parts[owner] = make()
        return found

    def __bool__(self) -> bool:
        return bool(self._parts)

    def finish(self) -> None:
        """The capture, or rehearsal, is about to end."""
        for part in self._parts.values():
            part.finish()

    def replayed(self, launch: Callable[[], Any]) -> Any:
        """Launch the graph, with what has to be done around it."""
        for part in self._parts.values():
            part.before_replay()
        result = launch()
        for part in self._parts.values():
            part.after_replay()
        return result


def current() -> GraphCapture | None:
    """The capture, or rehearsal of one, that this thread is in."""
    stack = getattr(_local, "stack", None)
    return stack[-1] if stack else None


@contextmanager
def rehearsal() -> Iterator[None]:
    """What fires inside is treated as in a capture, of a graph that is thrown away: for warm-up before a capture."""
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
        _tell(num_captures)


def _leave() -> None:
    global num_captures
    stack = getattr(_local, "stack", None)
    if stack:
        stack.pop()
        with _lock:
            num_captures -= 1
            _tell(num_captures)


def _tell(number: int) -> None:
    """Fast paths do not take what fires in a capture."""
    if (functions := library.functions()) is not None:
        functions.set_captures(number)


# ---- The wrappers


def watch() -> None:
    """Wrap the methods of ``torch.cuda.CUDAGraph``, until as many calls of :func:`unwatch`."""
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
    """Give the plain methods back, unless someone else has wrapped them since."""
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
    """Let this thread allocate and load kernels while a graph is captured, by this thread or another.

    The driver would otherwise end the capture with an error.
    """
    before = exchange_capture_mode(RELAXED)
    try:
        yield
    finally:
        if before is not None:
            exchange_capture_mode(before)
