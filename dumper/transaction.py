"""Transaction: one change of configuration that every rank accepts before any applies it."""

import time
from dataclasses import dataclass, field
from typing import Any

PREPARE_TIMEOUT_S = 5.0
"""How long a rank may take to accept or refuse."""
APPLY_WAIT_S = 1.0
"""How long the answer waits for ranks to reach the step; idle ones are then called pending."""


@dataclass(slots=True)
class Transaction:
    """A change under way. The recorder feeds answers in and asks what to do next."""

    epoch: int
    payload: dict[str, Any]
    """What ranks are asked to accept: ``config`` and its ``base``, or ``run`` for a reset."""
    shown: dict[str, Any]
    """What the answer repeats of it."""
    reply_to: bytes
    request_id: Any
    waiting: set[int]
    """Ranks that have not answered the prepare."""
    deadline: float = 0.0
    committed_at: int | None = None
    """Step named in the commit; None while preparing."""
    members: frozenset[int] = frozenset()
    applied: dict[int, int] = field(default_factory=dict)
    """rank -> step from which it applies."""
    refusals: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.members = frozenset(self.waiting)
        self.deadline = time.monotonic() + PREPARE_TIMEOUT_S

    def answer(self, rank: int, problem: str | None) -> None:
        """A rank accepted (None) or says why not."""
        self.waiting.discard(rank)
        if problem is not None:
            self.refusals[rank] = problem

    @property
    def accepted(self) -> bool:
        """Whether every rank said yes and the commit may go out."""
        return not self.waiting and not self.refusals and self.committed_at is None

    def commit(self, step: int) -> None:
        """The commit has gone out."""
        self.committed_at = step
        self.deadline = time.monotonic() + APPLY_WAIT_S

    def forget(self, rank: int) -> None:
        """A rank died; an unanswered prepare then counts as refused."""
        if rank in self.waiting:
            self.answer(rank, "the process died")
        self.members -= {rank}

    def outcome(self) -> tuple[int, dict[str, Any]] | None:
        """The HTTP status and body once there is one, else None."""
        late = time.monotonic() > self.deadline
        if self.committed_at is None:
            if self.refusals and (not self.waiting or late):
                return 400, {"error": _refused(self.refusals), "ranks": _texts(self.refusals)}
            if self.waiting and late:
                silent = ", ".join(map(str, sorted(self.waiting)))
                text = f"rank {silent} did not answer within {PREPARE_TIMEOUT_S:g} s; nothing was changed"
                return 504, {"error": text, "ranks": dict.fromkeys(map(str, sorted(self.waiting)), "no answer")}
            return None
        if not late and not self.members <= self.applied.keys():
            return None
        steps = {str(rank): self.applied.get(rank, "pending") for rank in sorted(self.members)}
        return 200, {"epoch": self.epoch, **self.shown, "ranks": steps}


def _refused(refusals: dict[int, str]) -> str:
    reasons = sorted(set(refusals.values()))
    return (
        reasons[0] if len(reasons) == 1 else "; ".join(f"rank {rank}: {why}" for rank, why in sorted(refusals.items()))
    )


def _texts(refusals: dict[int, str]) -> dict[str, str]:
    return {str(rank): why for rank, why in sorted(refusals.items())}
