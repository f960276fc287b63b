"""Autograd passes: detection of the autograd engine, and attribution of its work to a forward.

A module that fires while the engine runs is being recomputed (``torch.utils.checkpoint``). The firing belongs to the
step and microbatch whose forward created the engine's current graph node; that step may have ended long ago. Each
thread numbers the nodes that it creates in order, so it suffices to remember the number at which each forward began.
"""

import sys
import threading
from bisect import bisect_right
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

from tapscope.dumper.steps.open_step import OpenStep

_engine: Any = torch._C
graph_task = _engine._current_graph_task_id
"""Returns the id of the engine's graph task in this thread; -1 if the engine is not running here."""
_next_number = _engine._autograd._get_sequence_nr
_MAX_STEPS = 32
_MAX_MARKS = 1024


def next_node() -> int:
    """Return the sequence number of the next autograd node that this thread creates."""
    return int(_next_number())


def current_node() -> int | None:
    """Return the sequence number of the engine's current node in the graph of the forward; None if there is none.

    A reentrant checkpoint runs the engine again inside its backward, over nodes created by the recomputation. In that
    case, the result is the node of the checkpoint itself, which the forward created; for nested checkpoints, the
    outermost one.
    """
    node = _engine._current_autograd_node()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "backward" and code.co_argcount and code.co_varnames[0] == "ctx":
            context = frame.f_locals.get("ctx")
            node = context if isinstance(context, BackwardCFunction) else node
        frame = frame.f_back
    return None if node is None else int(node._sequence_nr())


class ForwardOrigin(NamedTuple):
    """Step and microbatch of the forward that a firing belongs to."""

    step: OpenStep
    micro: int


class _Trail:
    """Recent forwards of one thread, with the autograd node number at which each began."""

    __slots__ = ("numbers", "origins")

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.origins: list[ForwardOrigin] = []

    def note(self, origin: ForwardOrigin) -> None:
        number = next_node()
        if self.numbers and number < self.numbers[-1]:  # a new thread that reuses the id of an ended thread
            self.numbers.clear()
            self.origins.clear()
        elif self.origins and self.origins[-1] == origin:
            return
        self.numbers.append(number)
        self.origins.append(origin)
        oldest = origin.step.serial - _MAX_STEPS
        while len(self.numbers) > _MAX_MARKS or self.origins[0].step.serial < oldest:
            del self.numbers[0], self.origins[0]

    def find(self, number: int) -> ForwardOrigin | None:
        index = bisect_right(self.numbers, number) - 1
        return self.origins[index] if index >= 0 else None


class ForwardOrigins:
    """Maps autograd nodes to the step and microbatch that created them, for the last steps with gradients."""

    def __init__(self) -> None:
        self._trails: dict[int, _Trail] = {}
        self._latest: _Trail | None = None

    def note(self, step: OpenStep, micro: int) -> None:
        """Attribute the nodes that this thread creates from now on to microbatch ``micro`` of ``step``."""
        if not torch.is_grad_enabled():
            return
        thread = threading.get_ident()
        trail = self._trails.get(thread)
        if trail is None:
            self._drop_old(step.serial)
            trail = self._trails[thread] = _Trail()
        trail.note(ForwardOrigin(step, micro))
        self._latest = trail

    def find(self) -> ForwardOrigin | None:
        """Return the forward that is being recomputed; None if unknown.

        The engine runs CPU nodes in the thread that called ``backward``, and device nodes in its own threads. For the
        latter, the forward is assumed to have run in the thread of the latest :meth:`note`.
        """
        number = current_node()
        trail = self._trails.get(threading.get_ident()) or self._latest
        return None if number is None or trail is None else trail.find(number)

    def _drop_old(self, serial: int) -> None:
        for thread, trail in list(self._trails.items()):
            if not trail.origins or trail.origins[-1].step.serial < serial - _MAX_STEPS:
                del self._trails[thread]
