"""Inquiries of the recorder: one question to every rank, and the outcome of the answers."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

PREPARE_TIMEOUT_S = 5.0
"""How long a rank may take to accept, refuse or release."""
APPLY_WAIT_S = 1.0
"""How long the answer waits for ranks to reach the step; idle ranks are then reported as pending."""


@dataclass(slots=True, kw_only=True)
class Inquiry:
    """A question to every connected rank, and the answers so far."""

    epoch: int
    """Number of the inquiry; of a change, the epoch it would open."""
    reply_to: bytes
    request_id: Any
    members: frozenset[int]
    absent: dict[int, str]
    """Ranks that cannot be asked, or have left since -> why; the answer lists them too."""
    waiting: set[int] = field(init=False)
    """Ranks that have not answered."""
    died: set[int] = field(default_factory=set)
    """Ranks that left before they answered."""
    refusals: dict[int, str] = field(default_factory=dict)
    deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = set(self.members)
        self.deadline = time.monotonic() + PREPARE_TIMEOUT_S

    def answer(self, rank: int, problem: str | None) -> None:
        """A rank accepted (None) or named a problem."""
        self.waiting.discard(rank)
        if problem is not None:
            self.refusals[rank] = problem

    def forget(self, rank: int, why: str) -> None:
        """A rank left."""
        self.absent[rank] = why
        if rank in self.waiting:
            self.waiting.discard(rank)
            self.died.add(rank)
        self.members -= {rank}

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.deadline

    def lost(self) -> str | None:
        """A sentence that names the ranks that left or do not answer; None while every answer may still come."""
        if self.died and not self.waiting:
            return f"{ranks_text(self.died)} left before answering"
        if self.waiting and self.is_late:
            return f"{ranks_text(self.waiting)} did not answer within {PREPARE_TIMEOUT_S:g} s (stopped?)"
        return None

    def by_rank(self, answers: Mapping[int, Any]) -> dict[str, Any]:
        """The answers by rank, in order."""
        known: dict[int, Any] = dict(self.absent)
        known |= dict.fromkeys(self.waiting, "no answer")
        known |= {rank: answers[rank] for rank in self.members - self.waiting if rank in answers}
        return {str(rank): known[rank] for rank in sorted(known)}


@dataclass(slots=True, kw_only=True)
class Transaction(Inquiry):
    """A change that every rank accepts before any applies it."""

    payload: dict[str, Any]
    """What ranks are asked to accept: ``config`` and its ``base``, or ``run`` for a reset."""
    shown: dict[str, Any]
    """The part of it that the answer repeats."""
    committed_at: int | None = None
    """Step named in the commit; None while preparing."""
    applied: dict[int, int] = field(default_factory=dict)
    """rank -> step from which it applies."""
    unmatched: dict[int, dict[str, str]] = field(default_factory=dict)
    """rank -> rules that match no site there, each with an explanation."""

    @property
    def accepted(self) -> bool:
        """Whether every rank accepted and the commit may be sent."""
        ready = not self.waiting and not self.died and self.committed_at is None
        return ready and not self.refusals and self._unmatched_everywhere() is None

    def commit(self, step: int) -> None:
        """The commit was sent."""
        self.committed_at = step
        self.deadline = time.monotonic() + APPLY_WAIT_S

    def outcome(self) -> tuple[int, dict[str, Any]] | None:
        """The HTTP status and body of the answer; None while there is none."""
        if self.committed_at is None:
            return self._refused()
        if not self.is_late and not self.members <= self.applied.keys():
            return None
        steps = {rank: self.applied.get(rank, "pending") for rank in self.members}
        answer = {"epoch": self.epoch, **self.shown, "ranks": self.by_rank(steps)}
        if any(self.unmatched.values()):
            answer["unmatched"] = {str(rank): sorted(rules) for rank, rules in sorted(self.unmatched.items()) if rules}
        return 200, answer

    def _refused(self) -> tuple[int, dict[str, Any]] | None:
        accepted = dict.fromkeys(self.members - self.waiting, "accepted")
        if (lost := self.lost()) is not None and not self.refusals:
            return 504, {"error": f"{lost}; nothing was changed", "ranks": self.by_rank(accepted)}
        if self.waiting and not self.is_late:
            return None
        if self.refusals:
            return 400, {"error": one_text(self.refusals), "ranks": self.by_rank(accepted | self.refusals)}
        if (unmatched := self._unmatched_everywhere()) is not None:
            return 400, {"error": one_text(unmatched), "ranks": self.by_rank(accepted | unmatched)}
        return None

    def _unmatched_everywhere(self) -> dict[int, str] | None:
        """rank -> why a rule that no rank matches is refused; None when every rule matches on some rank."""
        rules = [set(self.unmatched.get(rank, ())) for rank in self.members]
        nowhere = set.intersection(*rules) if rules else set()
        if not nowhere:
            return None
        rule = min(nowhere)
        return {rank: self.unmatched[rank][rule] for rank in self.members}


@dataclass(slots=True, kw_only=True)
class Release(Inquiry):
    """A request that the flight recorders of all ranks send their last ``past`` steps."""

    past: int
    released: dict[int, dict[str, int]] = field(default_factory=dict)
    """rank -> ``steps`` and ``bytes`` it has sent."""

    def outcome(self) -> tuple[int, dict[str, Any]] | None:
        """The HTTP status and body of the answer; None while there is none."""
        ranks = self.by_rank(self.released | self.refusals)
        if (lost := self.lost()) is not None:
            return 504, {
                "error": f"{lost}; the other ranks have released their steps",
                "past": self.past,
                "ranks": ranks,
            }
        if self.waiting:
            return None
        if self.refusals and not self.released:
            return 400, {"error": one_text(self.refusals), "ranks": ranks}
        return 200, {"past": self.past, "ranks": ranks}


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 1``, ``ranks 1, 2``."""
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def one_text(reasons: Mapping[int, str]) -> str:
    """The common reason, or each rank's own when they differ."""
    different = sorted(set(reasons.values()))
    if len(different) == 1:
        return different[0]
    return "; ".join(f"rank {rank}: {why}" for rank, why in sorted(reasons.items()))
