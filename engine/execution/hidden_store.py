"""HiddenStore: hidden states that a draft head has not read yet, on every rank.

The head's row at position p reads the token at p + 1 and the hidden state at p: the target's where it has computed p,
else the head's own output at p - 1. Every rank keeps the states of its steps; rank 0 decides which rows to compute.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tapscope.engine.requests.kept_rows import KeptRows
from tapscope.engine.requests.step_plan import ScheduledRequest, StepPlan

MAX_WAITING = 64
"""Rows of a request that decodes without drafts for which the head waits."""


@dataclass(slots=True)
class _Held:
    """Consecutive hidden states of one request."""

    request: str
    pieces: list[tuple[int, Tensor]] = field(default_factory=list)
    """(first position, [rows, width]), in order of position and without gaps."""
    tree: list[Tensor] = field(default_factory=list)
    """The head's own states [width] of the rows of a draft tree."""

    @property
    def end(self) -> int:
        start, states = self.pieces[-1]
        return start + len(states)

    def put(self, start: int, states: Tensor) -> None:
        """Replace everything from ``start`` on; states that would be followed by a gap are dropped."""
        kept = [(first, piece[: start - first]) for first, piece in self.pieces if first < start]
        self.pieces = kept
        if kept and self.end != start:
            self.pieces = []
        self.pieces.append((start, states))

    def take(self, start: int, count: int) -> Tensor:
        """[count, width] from ``start`` on; they and earlier ones are dropped."""
        end, taken, left = start + count, [], []
        for first, states in self.pieces:
            taken.append(states[max(0, start - first) : max(0, end - first)])
            if first + len(states) > end:
                left.append((max(first, end), states[max(0, end - first) :]))
        self.pieces = left
        return torch.cat([states for states in taken if len(states)])


class HiddenStore:
    """By row of the page table."""

    def __init__(self) -> None:
        self._rows: dict[int, _Held] = {}

    def start(self, row: int, request: str) -> int | None:
        """First position whose state is held for ``request``, which runs in ``row``; None without any."""
        held = self._rows.get(row)
        return held.pieces[0][0] if held is not None and held.request == request and held.pieces else None

    def put_step(self, plan: StepPlan, states: Tensor) -> None:
        """Keep the target's states [rows, width] of a step."""
        has_prompts = plan.phase in ("prefill", "mixed")  # many rows, which a view of a few would keep in memory
        if not has_prompts:
            states = _kept(states)
        for slot, item in zip(plan.slots, plan.scheduled, strict=True):
            held = self._rows.get(item.row)
            if held is None or held.request != item.request:
                held = self._rows[item.row] = _Held(item.request)
            rows = states[slot : slot + len(item.tokens)]
            held.put(item.position, rows.clone() if has_prompts else rows)

    def put_outputs(self, plan: StepPlan, states: Tensor) -> None:
        """Keep the head's own states [rows, width] after the rows that it drafts from, for the rows that follow."""
        states = _kept(states)
        for slot, item in zip(plan.slots, plan.scheduled, strict=True):
            if item.tree:
                self._rows[item.row].tree += states[slot : slot + len(item.tokens)]
            elif item.samples:
                self._rows[item.row].tree = []
                last = slot + len(item.tokens) - 1
                self._rows[item.row].put(item.position + len(item.tokens), states[last : last + 1])

    def take_step(self, plan: StepPlan) -> Tensor:
        """The states [rows, width] that a step of the head reads, which are then dropped."""
        return torch.cat([self._take(item) for item in plan.scheduled])

    def _take(self, item: ScheduledRequest) -> Tensor:
        held = self._rows[item.row]
        if not item.tree:
            return held.take(item.position, len(item.tokens))
        ((_, last),) = held.pieces  # after the last row that is not in the tree
        earlier = [last[0], *held.tree]
        return torch.stack([earlier[parent + 1] for parent in item.tree[-len(item.tokens) :]])

    def keep_rows(self, kept: KeptRows) -> None:
        """Of the states of a step that verified a draft tree, keep those of the accepted branch."""
        held = self._rows.get(kept.row)
        if held is None or held.request != kept.request:
            return
        first, states = held.pieces[-1]
        held.put(kept.position, states[[kept.position - first + row for row in kept.rows]])


def _kept(states: Tensor) -> Tensor:
    """``states``, copied on a GPU: they may be in memory of a CUDA graph, which its next replay overwrites."""
    return states.clone() if states.is_cuda else states
