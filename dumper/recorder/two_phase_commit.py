"""Inquiries: requests from the recorder to every rank, e.g. two-phase commits, and their outcomes."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

PREPARE_TIMEOUT_S = 5.0
"""Timeout in seconds for a rank to accept, refuse or release."""
APPLY_WAIT_S = 1.0
"""Maximum time in seconds that the reply waits for ranks to apply a commit; idle ranks are then reported as pending."""


@dataclass(slots=True, kw_only=True)
class Inquiry:
    """A request to every connected rank, and the answers so far."""

    epoch: int
    """Number of the inquiry; for a change, the epoch that its commit starts."""
    reply_to: bytes
    """ZeroMQ identity of the client."""
    request_id: Any
    members: frozenset[int]
    """Connected ranks, which must answer."""
    absent: dict[int, str]
    """Rank that was not connected or has left since -> reason; included in the reply."""
    waiting: set[int] = field(init=False)
    """Ranks that have not answered yet."""
    died: set[int] = field(default_factory=set)
    """Ranks that left before they answered."""
    refusals: dict[int, str] = field(default_factory=dict)
    """Rank -> problem it reported."""
    deadline: float = field(init=False)
    """Time on the monotonic clock after which missing answers are a timeout."""

    def __post_init__(self) -> None:
        self.waiting = set(self.members)
        self.deadline = time.monotonic() + PREPARE_TIMEOUT_S

    def answer(self, rank: int, problem: str | None) -> None:
        """Note the answer of a rank: None if it accepted, else its problem."""
        self.waiting.discard(rank)
        if problem is not None:
            self.refusals[rank] = problem

    def forget(self, rank: int, why: str) -> None:
        """Note that a rank left, and stop waiting for its answer."""
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
        """Return a phrase that names the ranks that left or timed out; None while all answers may still arrive."""
        if self.died and not self.waiting:
            return f"{ranks_text(self.died)} left before answering"
        if self.waiting and self.is_late:
            return f"{ranks_text(self.waiting)} did not answer within {PREPARE_TIMEOUT_S:g} s (stopped?)"
        return None

    def by_rank(self, answers: Mapping[int, Any]) -> dict[str, Any]:
        """Return rank -> answer in rank order, including absent ranks and ranks without an answer."""
        known: dict[int, Any] = dict(self.absent)
        known |= dict.fromkeys(self.waiting, "no answer")
        known |= {rank: answers[rank] for rank in self.members - self.waiting if rank in answers}
        return {str(rank): known[rank] for rank in sorted(known)}


@dataclass(slots=True, kw_only=True)
class Transaction(Inquiry):
    """A two-phase commit: every rank must accept a change before any rank applies it."""

    payload: dict[str, Any]
    """The proposed change: ``config`` and its ``base``, or ``run`` for a reset."""
    shown: dict[str, Any]
    """Fields of the change that the reply repeats."""
    committed_at: int | None = None
    """Step of the commit message; None during the prepare phase."""
    applied: dict[int, int] = field(default_factory=dict)
    """Rank -> step from which the change applies there."""
    unmatched: dict[int, dict[str, str]] = field(default_factory=dict)
    """Rank -> rules that match no site there, each with an explanation."""

    @property
    def accepted(self) -> bool:
        """Whether every rank accepted, so that the commit can be sent."""
        ready = not self.waiting and not self.died and self.committed_at is None
        return ready and not self.refusals and self._unmatched_everywhere() is None

    def commit(self, step: int) -> None:
        """Note that the commit was sent with ``step``; wait for ranks to apply it from now on."""
        self.committed_at = step
        self.deadline = time.monotonic() + APPLY_WAIT_S

    def outcome(self) -> tuple[int, dict[str, Any]] | None:
        """Return the HTTP status and body of the answer; None while the outcome is open."""
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
        """Return rank -> explanation for a rule that matches on no rank; None if every rule matches on some rank."""
        rules = [set(self.unmatched.get(rank, ())) for rank in self.members]
        nowhere = set.intersection(*rules) if rules else set()
        if not nowhere:
            return None
        rule = min(nowhere)
        return {rank: self.unmatched[rank][rule] for rank in self.members}


@dataclass(slots=True, kw_only=True)
class Release(Inquiry):
    """A request to the flight recorders of all ranks to send their last ``past`` steps."""

    past: int
    released: dict[int, dict[str, int]] = field(default_factory=dict)
    """Rank -> number of ``steps`` and ``bytes`` it has sent."""

    def outcome(self) -> tuple[int, dict[str, Any]] | None:
        """Return the HTTP status and body of the answer; None while the outcome is open."""
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
    """Format rank numbers: ``rank 1``, ``ranks 1, 2``."""
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def one_text(reasons: Mapping[int, str]) -> str:
    """Return the common reason of all ranks, or the reason of each rank if the reasons differ."""
    different = sorted(set(reasons.values()))
    if len(different) == 1:
        return different[0]
    return "; ".join(f"rank {rank}: {why}" for rank, why in sorted(reasons.items()))
