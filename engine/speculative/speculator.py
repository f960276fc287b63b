"""Speculator: how many tokens to propose for each request, and how many proposals were accepted.

The number of draft tokens of a request follows its acceptance: it doubles when all drafts were accepted, and shrinks
otherwise. When single drafts are rejected twice in a row, the request decodes without drafts for a while, and for twice
as long after each further failure. This rule reads no clock. Where the device drafts chains, a step of the head takes
as long for one request as for all: then each request always gets all drafts.

With :class:`.DraftCosts` a step has drafts only while those that are likely accepted save more time than all of them
take; then steps depend on the machine's speed, but output tokens do not.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tapscope.engine.kv_cache.draft_tree import depths
from tapscope.engine.requests.drafts import Drafts
from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import ScheduledRequest, StepPlan
from tapscope.engine.speculative.draft_cost import DraftCosts
from tapscope.engine.speculative.proposer import AheadProposer, Proposer

_FIRST_PAUSE = 16
"""Steps without drafts after the first failure of a request."""
_MAX_PAUSE = 512
_DECAY = 7 / 8
"""Weight of what is known about a request's acceptance against one further verification."""
_DECAY_OF_ALL = 31 / 32
"""Weight of what is known about the acceptance of all requests against one further verification of any."""
_MAX_PRIOR_VERIFICATIONS = 2
"""Verifications that a new request counts as, of the acceptance of those before it."""


@dataclass(slots=True)
class SpeculationStats:
    """Counters; they only increase."""

    num_verifications: int = 0
    """Times that drafts of a request were verified."""
    num_draft_tokens: int = 0
    """Draft tokens verified."""
    num_accepted_tokens: int = 0
    """Draft tokens accepted."""
    draft_seconds: float = 0.0
    """Time spent on proposing."""
    num_unprofitable_steps: int = 0
    """Steps without drafts because they would take more time than the accepted ones would save."""
    drafted_by_position: list[int] = field(default_factory=list)
    """Verifications with drafts, by the drafts' position after the request's last token."""
    accepted_by_position: list[int] = field(default_factory=list)
    """Drafts accepted, likewise."""

    def count(self, num_drafts: int, depth: int, num_accepted: int) -> None:
        """Add one verification; ``depth``: positions that have drafts."""
        self.num_verifications += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        for counts, number in ((self.drafted_by_position, depth), (self.accepted_by_position, num_accepted)):
            counts += [0] * (depth - len(counts))
            for position in range(number):
                counts[position] += 1

    @property
    def acceptance_length(self) -> float:
        """Tokens that a verification yields on average, from 1 (no draft accepted); 0 before the first one."""
        return 1 + self.num_accepted_tokens / self.num_verifications if self.num_verifications else 0.0


class DraftLength:
    """The number of draft tokens of one request; in a tree, of its longest branch."""

    def __init__(self, most: int, num_drafts: int | None = None, acceptance: float | None = None) -> None:
        """``num_drafts``: draft tokens of a step with branches of ``most`` tokens; None: a chain; ``acceptance``: of
        earlier requests, None: not known, as if the first branch were accepted.
        """
        self._most, self.length = most, most
        count = most if num_drafts is None else num_drafts
        share, weight = (most / count, 1) if acceptance is None else (acceptance, _MAX_PRIOR_VERIFICATIONS)
        self._num_accepted, self._num_drafts = share * count * weight, float(count * weight)
        """Sums over the last verifications, whose weights decrease."""
        self._pause, self._resume_at = _FIRST_PAUSE, 0
        self._has_failed = False
        """Whether the last verification was of a single draft, which was rejected."""

    def wanted(self, num_generated: int) -> int:
        """Draft tokens after one another to propose for a request that has generated this many tokens."""
        return self.length if num_generated >= self._resume_at else 0

    def update(self, num_generated: int, depth: int, num_accepted: int, num_drafts: int | None = None) -> None:
        """After a verification of ``num_drafts`` draft tokens, ``depth`` of them after one another; None: a chain."""
        self._num_drafts = _DECAY * self._num_drafts + (depth if num_drafts is None else num_drafts)
        self._num_accepted = _DECAY * self._num_accepted + num_accepted
        if num_accepted == depth:
            self.length = min(self._most, max(self.length, 2 * depth))
        elif num_accepted:
            self.length = max(1, min(self._most, num_accepted + 1))
        elif depth > 1 and self.length > 1:
            self.length = depth // 2
        elif not self._has_failed:  # one of five good drafts is rejected too
            self._has_failed = True
        else:
            self._resume_at = num_generated + self._pause
            self._pause = min(_MAX_PAUSE, 2 * self._pause)
        if num_accepted:
            self._pause, self._has_failed = _FIRST_PAUSE, False

    @property
    def acceptance(self) -> float:
        """Share of draft tokens that are accepted, from 0 to 1."""
        return self._num_accepted / self._num_drafts


class Speculator:
    """The proposer of one engine, with what is known about the acceptance of its proposals."""

    def __init__(
        self, proposer: Proposer, depth: int, *, num_drafts: int | None = None, costs: DraftCosts | None = None
    ) -> None:
        """``depth``: draft tokens after one another of a request in a step; ``num_drafts``: all of them, None in a
        chain; ``costs``: None to draft whatever it costs, so that steps do not depend on the machine's speed.
        """
        self.proposer, self._costs = proposer, costs
        self._device_proposer = proposer if isinstance(proposer, AheadProposer) else None
        """The proposer, if it can draft on the device."""
        self.stats = SpeculationStats()
        self._depth, self._num_drafts = depth, num_drafts
        self._lengths: dict[str, DraftLength] = {}
        self._num_accepted, self._num_verified = 0.0, 0.0
        """Draft tokens of the last verifications of all requests, whose weights decrease."""
        self._has_counted = False
        """Whether the next step is counted as one without drafts already."""
        self._drafts_next = True
        """What :meth:`drafts_next` found last."""
        self._counts_next: dict[str, int] = {}
        """How far ahead to propose for each request, as it found."""
        self._was_refused = False
        """Whether the last :meth:`draft_ahead` could not start drafts that were wanted."""
        self.last_draft_s = 0.0
        """Time that the last :meth:`propose` took."""

    def propose(self, requests: Sequence[Request], *, is_recorded: bool = False) -> dict[str, Drafts]:
        """Request id -> draft tokens, for those of the running requests that speculate now.

        ``is_recorded``: the step does not depend on costs, so that recordings of equal requests have equal steps.
        """
        begin = time.perf_counter()
        counts, ahead = self._counts(requests), None
        if self._device_proposer is not None and not is_recorded:
            ahead = self._device_proposer.take_ahead(counts)
        if ahead is None and not self._pays(counts, is_recorded=is_recorded):
            counts = [(request, 0) for request, _ in counts]
        elif not is_recorded:
            counts = [(request, 0 if self._drafts_ahead(request) else count) for request, count in counts]
        drafts = {**self.proposer.propose(counts), **(ahead or {})}
        for request in requests:
            chain = drafts.get(request.id)
            if request.constraint is not None and chain is not None and not chain.parents:
                drafts[request.id] = chain.first(request.constraint.num_valid(chain.tokens))
        self._has_counted = False
        self.last_draft_s = time.perf_counter() - begin
        self.stats.draft_seconds += self.last_draft_s
        return drafts

    def _drafts_ahead(self, request: Request) -> bool:
        """Whether :meth:`draft_ahead` drafts for the request, so that :meth:`propose` need not wait for the device."""
        if self._was_refused or self._device_proposer is None:
            return False
        return self._device_proposer.drafts_ahead(request)

    def drafts_next(self, requests: Sequence[Request]) -> bool:
        """Whether the step after the one in flight, of the running ``requests``, may have drafts."""
        counts, self._has_counted = self._counts(requests), False
        self._counts_next = {request.id: count for request, count in counts}
        self._drafts_next = any(self._counts_next.values()) and self._pays(counts)
        self._has_counted = not self._drafts_next
        return self._drafts_next

    def is_behind(self, requests: Sequence[Request]) -> bool:
        """Whether the draft model has computed so little that :meth:`catch_up` is due, also without drafts."""
        return self._device_proposer is not None and self._device_proposer.is_behind(requests)

    def catch_up(self, requests: Sequence[Request]) -> None:
        """As :meth:`.AheadProposer.catch_up`."""
        assert self._device_proposer is not None, "others are never behind"
        begin = time.perf_counter()
        self._device_proposer.catch_up(requests)
        self.stats.draft_seconds += time.perf_counter() - begin

    def draft_ahead(self, plan: StepPlan, requests: Sequence[Request], sampled: Tensor) -> int:
        """As :meth:`.AheadProposer.draft_ahead`, for the requests of a step in flight; 0 of other proposers."""
        if self._device_proposer is None or not self._drafts_next:
            return 0
        begin = time.perf_counter()
        counts = [(request, self._counts_next.get(request.id, 0)) for request in requests]
        num_steps = self._device_proposer.draft_ahead(plan, counts, sampled)
        self._was_refused = num_steps == 0
        self.stats.draft_seconds += time.perf_counter() - begin
        return num_steps

    def read_ahead(self) -> Mapping[str, Sequence[int]]:
        """As :meth:`.AheadProposer.read_ahead`."""
        assert self._device_proposer is not None, "others leave no placeholders"
        return self._device_proposer.read_ahead()

    def record(self, request: Request, scheduled: ScheduledRequest) -> None:
        """The drafts of the request in ``scheduled`` were verified."""
        depth = scheduled.num_drafts if not scheduled.tree else max(depths(scheduled.tree))
        self.stats.count(scheduled.num_drafts, depth, request.num_accepted)
        if (length := self._lengths.get(request.id)) is not None:
            length.update(request.num_generated, depth, request.num_accepted, scheduled.num_drafts)
            self._num_accepted = _DECAY_OF_ALL * self._num_accepted + request.num_accepted
            self._num_verified = _DECAY_OF_ALL * self._num_verified + scheduled.num_drafts

    def record_time(self, plan: StepPlan, seconds: float) -> None:
        """The step took ``seconds``, drafting included."""
        if self._costs is not None:
            self._costs.record(plan, seconds)

    def forget(self, request: Request) -> None:
        """The request has ended; safe to call more than once."""
        self._lengths.pop(request.id, None)
        self.proposer.forget(request.id)

    def state(self) -> dict[str, Any]:
        """Counters as JSON values."""
        stats = self.stats
        return {
            "num_verifications": stats.num_verifications,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_accepted_tokens": stats.num_accepted_tokens,
            "draft_seconds": stats.draft_seconds,
            "acceptance_length": stats.acceptance_length,
            "drafted_by_position": list(stats.drafted_by_position),
            "accepted_by_position": list(stats.accepted_by_position),
            "num_unprofitable_steps": stats.num_unprofitable_steps,
            "draft_costs": {} if self._costs is None else self._costs.state(),
        }

    def _counts(self, requests: Sequence[Request]) -> list[tuple[Request, int]]:
        """How far ahead to propose for each request, if drafts pay."""
        return [(request, self._wanted(request) if request.can_speculate else 0) for request in requests]

    def _pays(self, counts: Sequence[tuple[Request, int]], *, is_recorded: bool = False) -> bool:
        """Whether as many drafts are likely to save more time than they take; counts steps for which they do not."""
        total = sum(count for _, count in counts)
        if not total or self._costs is None or is_recorded:
            return True
        accepted = sum(count * self._lengths[request.id].acceptance for request, count in counts if count)
        if self._costs.drafting_pays([request for request, _ in counts], accepted / total):
            return True
        self.stats.num_unprofitable_steps += not self._has_counted
        return False

    def _wanted(self, request: Request) -> int:
        if (length := self._lengths.get(request.id)) is None:
            acceptance = self._num_accepted / self._num_verified if self._num_verified else None
            length = self._lengths[request.id] = DraftLength(self._depth, self._num_drafts, acceptance)
        wanted = self._depth if self._drafts_ahead(request) else length.wanted(request.num_generated)
        return max(0, min(wanted, request.max_new_tokens - request.num_generated - 1))
