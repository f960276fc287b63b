"""Autograd passes: whether the autograd engine is running, and which forward its work belongs to.

What fires while the engine runs is a recomputation (``torch.utils.checkpoint``). It belongs to the step and microbatch
whose forward created the graph node that the engine is at; that step may have ended long ago. Nodes are numbered in
order by the thread that creates them, so it is enough to remember the number at which each forward began.
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
"""Number of the engine's graph task in this thread; -1 when the engine does not run here."""
_next_number = _engine._autograd._get_sequence_nr
_MAX_STEPS = 32
_MAX_MARKS = 1024


def next_node() -> int:
    """Number of the next node that this thread creates."""
    return int(_next_number())


def current_node() -> int | None:
    """Number of the node of the forward's graph that the engine is at.

    A reentrant checkpoint runs the engine again inside its backward, over nodes that the recomputation created. Then
    the checkpoint's own node counts, and of nested ones the outermost, which the forward created.
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
    """The forward that a firing belongs to."""

    step: OpenStep
    micro: int


class _Trail:
    """The forwards of one thread, and the node number at which each began."""

    __slots__ = ("numbers", "origins")

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.origins: list[ForwardOrigin] = []

    def note(self, origin: ForwardOrigin) -> None:
        number = next_node()
        if self.numbers and number < self.numbers[-1]:  # another thread that reuses the id of one that has ended
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
    """The step and microbatch in which graph nodes were created, for the last steps with gradients."""

    def __init__(self) -> None:
        self._trails: dict[int, _Trail] = {}
        self._latest: _Trail | None = None

    def note(self, step: OpenStep, micro: int) -> None:
        """From now on this thread creates nodes for that forward."""
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
        """The forward that is being recomputed; None when unknown.

        The engine runs CPU work in the thread that called ``backward``, and device work in its own threads: for those,
        the thread of the latest forward is assumed.
        """
        number = current_node()
        trail = self._trails.get(threading.get_ident()) or self._latest
        return None if number is None or trail is None else trail.find(number)

    def _drop_old(self, serial: int) -> None:
        for thread, trail in list(self._trails.items()):
            if not trail.origins or trail.origins[-1].step.serial < serial - _MAX_STEPS:
                del self._trails[thread]
