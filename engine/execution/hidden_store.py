"""HiddenStore: hidden states that a draft head has not read yet, on every rank.

The head's row at position p reads the token at p + 1 and the hidden state at p: the target's if the target has computed
p, otherwise the head's own output at p - 1. Every rank keeps the states of its steps; rank 0 decides which rows to
compute.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from tapscope.engine.requests.kept_rows import KeptRows
from tapscope.engine.requests.step_plan import ScheduledRequest, StepPlan
from tapscope.engine.sampling.device_copy import to_device

MAX_WAITING = 64
"""Maximum number of rows that the head defers for a request that decodes without drafts."""


class _Piece(NamedTuple):
    """States of consecutive positions of one request, as a range of a step's rows; views are slow, so made lazily."""

    start: int
    """First position."""
    num: int
    states: Tensor
    """[rows, width], all states of the step."""
    slot: int
    """Row of position ``start``."""

    @property
    def end(self) -> int:
        return self.start + self.num

    @property
    def rows(self) -> Tensor:
        """States of the piece, [num, width]."""
        return self.states[self.slot : self.slot + self.num]


@dataclass(slots=True)
class _Held:
    """Consecutive hidden states of one request."""

    request: str
    pieces: list[_Piece] = field(default_factory=list)
    """In order of position and without gaps."""
    tree: list[Tensor] = field(default_factory=list)
    """The head's own states [width] of the rows of a draft tree."""

    def put(self, piece: _Piece) -> None:
        """Replace all states from ``piece.start`` on; earlier states are dropped if a gap would follow them."""
        pieces = self.pieces
        while pieces and pieces[-1].start >= piece.start:
            pieces.pop()
        if pieces:
            last = pieces[-1]
            if last.end < piece.start:
                pieces.clear()
            elif last.end > piece.start:
                pieces[-1] = last._replace(num=piece.start - last.start)
        pieces.append(piece)

    def take(self, start: int, count: int) -> list[_Piece]:
        """Remove and return ``count`` states from position ``start`` on; earlier states are dropped."""
        end, taken, left = start + count, list[_Piece](), list[_Piece]()
        for piece in self.pieces:
            low, high = max(start, piece.start), min(end, piece.end)
            if low < high:
                taken.append(_part(piece, low, high))
            if piece.end > end:
                left.append(_part(piece, max(end, piece.start), piece.end))
        self.pieces = left
        return taken


class HiddenStore:
    """Hidden states by row of the page table."""

    def __init__(self) -> None:
        self._rows: dict[int, _Held] = {}

    def start(self, row: int, request: str) -> int | None:
        """Return the first position with a stored state of ``request`` in ``row``; None without states."""
        held = self._rows.get(row)
        return held.pieces[0].start if held is not None and held.request == request and held.pieces else None

    def put_step(self, plan: StepPlan, states: Tensor) -> None:
        """Store the target's states [rows, width] of a step."""
        has_prompts = plan.phase in ("prefill", "mixed")  # many rows, which a view of a few rows would keep alive
        if not has_prompts:
            states = _kept(states)
        for slot, item in zip(plan.slots, plan.scheduled, strict=True):
            held = self._rows.get(item.row)
            if held is None or held.request != item.request:
                held = self._rows[item.row] = _Held(item.request)
            count = len(item.tokens)
            if has_prompts:
                held.put(_Piece(item.position, count, states[slot : slot + count].clone(), 0))
            else:
                held.put(_Piece(item.position, count, states, slot))

    def put_outputs(self, plan: StepPlan, states: Tensor) -> None:
        """Store the head's own states [rows, width] of the rows that it drafts from, for the rows that follow."""
        states = _kept(states)
        for slot, item in zip(plan.slots, plan.scheduled, strict=True):
            if item.tree:
                self._rows[item.row].tree += states[slot : slot + len(item.tokens)]
            elif item.samples:
                self._rows[item.row].tree = []
                last = slot + len(item.tokens) - 1
                self._rows[item.row].put(_Piece(item.position + len(item.tokens), 1, states, last))

    def take_step(self, plan: StepPlan) -> Tensor:
        """Remove and return the states [rows, width] that a step of the head reads."""
        if any(item.tree for item in plan.scheduled):
            return torch.cat([self._take(item) for item in plan.scheduled])
        taken = (self._rows[item.row].take(item.position, len(item.tokens)) for item in plan.scheduled)
        return _joined(list(chain.from_iterable(taken)))

    def _take(self, item: ScheduledRequest) -> Tensor:
        held = self._rows[item.row]
        if not item.tree:
            return _joined(held.take(item.position, len(item.tokens)))
        (piece,) = held.pieces  # the state after the last row outside the tree
        earlier = [piece.rows[0], *held.tree]
        return torch.stack([earlier[parent + 1] for parent in item.tree[-len(item.tokens) :]])

    def keep_rows(self, kept: KeptRows) -> None:
        """Keep only the accepted branch's states, of a step that verified a draft tree."""
        held = self._rows.get(kept.row)
        if held is None or held.request != kept.request:
            return
        last = held.pieces[-1]
        states = last.rows[[kept.position - last.start + row for row in kept.rows]]
        held.put(_Piece(kept.position, len(states), states, 0))


def _kept(states: Tensor) -> Tensor:
    """Return ``states``, copied on a GPU, where they may be in CUDA graph memory that the next replay overwrites."""
    return states.clone() if states.is_cuda else states


def _part(piece: _Piece, low: int, high: int) -> _Piece:
    """Return the positions [low, high) of ``piece``."""
    if (low, high) == (piece.start, piece.end):
        return piece
    return _Piece(low, high - low, piece.states, piece.slot + low - piece.start)


def _joined(pieces: Sequence[_Piece]) -> Tensor:
    """Concatenate pieces to [rows, width]; the states of a step are copied once, not piece by piece."""
    steps = {id(piece.states): piece.states for piece in pieces}
    firsts = dict(zip(steps, accumulate(map(len, steps.values()), initial=0), strict=False))
    states = next(iter(steps.values())) if len(steps) == 1 else torch.cat(list(steps.values()))
    rows = [firsts[id(piece.states)] + piece.slot + i for piece in pieces for i in range(piece.num)]
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return states if len(rows) == len(states) else states[rows[0] : rows[0] + len(rows)]
    return states[to_device(rows, states.device)]
