"""Speculator: how many tokens to draft for each request, and how many drafts were accepted.

The number of drafts of a request follows its acceptance: it doubles after all drafts were accepted and shrinks
otherwise. After two consecutive rejections of a single draft, the request pauses speculation, and each further failure
doubles the pause. This rule does not depend on time. If the device drafts chains, one step of the head takes as long
for one request as for all, so every request gets all drafts.

With :class:`.DraftCosts`, a step has drafts only while the expected accepted drafts save more time than drafting takes.
Steps then depend on the machine's speed, but output tokens do not.
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
"""Length of a request's first pause, in steps without drafts."""
_MAX_PAUSE = 512
_DECAY = 7 / 8
"""Weight of a request's past acceptance relative to its next verification."""
_DECAY_OF_ALL = 31 / 32
"""Weight of the past acceptance of all requests relative to the next verification of any request."""
_MAX_PRIOR_VERIFICATIONS = 2
"""Weight, in verifications, of earlier requests' acceptance as the prior of a new request."""


@dataclass(slots=True)
class SpeculationStats:
    """Cumulative counters of speculative decoding."""

    num_verifications: int = 0
    """Number of times that a request's drafts were verified."""
    num_draft_tokens: int = 0
    """Draft tokens verified."""
    num_accepted_tokens: int = 0
    """Draft tokens accepted."""
    draft_seconds: float = 0.0
    """Time spent drafting."""
    num_unprofitable_steps: int = 0
    """Steps without drafts because drafting would have taken more time than it would have saved."""
    drafted_by_position: list[int] = field(default_factory=list)
    """Verifications that had a draft at each position after the request's last token."""
    accepted_by_position: list[int] = field(default_factory=list)
    """Accepted drafts at each position after the request's last token."""

    def count(self, num_drafts: int, depth: int, num_accepted: int) -> None:
        """Add one verification; ``depth``: number of positions with drafts."""
        self.num_verifications += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        for counts, number in ((self.drafted_by_position, depth), (self.accepted_by_position, num_accepted)):
            counts += [0] * (depth - len(counts))
            for position in range(number):
                counts[position] += 1

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens per verification, at least 1 (no draft accepted); 0 before the first verification."""
        return 1 + self.num_accepted_tokens / self.num_verifications if self.num_verifications else 0.0


class DraftLength:
    """Adaptive number of draft tokens for one request; for a tree, the length of its longest branch."""

    def __init__(self, most: int, num_drafts: int | None = None, acceptance: float | None = None) -> None:
        """``most``: maximum length. ``num_drafts``: draft tokens of a tree of that depth; None for a chain.
        ``acceptance``: acceptance rate of earlier requests; None if unknown, which assumes that the first branch is
        accepted.
        """
        self._most, self.length = most, most
        count = most if num_drafts is None else num_drafts
        share, weight = (most / count, 1) if acceptance is None else (acceptance, _MAX_PRIOR_VERIFICATIONS)
        self._num_accepted, self._num_drafts = share * count * weight, float(count * weight)
        """Exponentially weighted sums over past verifications."""
        self._pause, self._resume_at = _FIRST_PAUSE, 0
        self._has_failed = False
        """Whether the last verification rejected a single draft."""

    def wanted(self, num_generated: int) -> int:
        """Return the draft depth for a request that has generated ``num_generated`` tokens; 0 during a pause."""
        return self.length if num_generated >= self._resume_at else 0

    def update(self, num_generated: int, depth: int, num_accepted: int, num_drafts: int | None = None) -> None:
        """Update after a verification of ``num_drafts`` draft tokens (None: a chain) of depth ``depth``."""
        self._num_drafts = _DECAY * self._num_drafts + (depth if num_drafts is None else num_drafts)
        self._num_accepted = _DECAY * self._num_accepted + num_accepted
        if num_accepted == depth:
            self.length = min(self._most, max(self.length, 2 * depth))
        elif num_accepted:
            self.length = max(1, min(self._most, num_accepted + 1))
        elif depth > 1 and self.length > 1:
            self.length = depth // 2
        elif not self._has_failed:  # even of good drafts, one in five is rejected
            self._has_failed = True
        else:
            self._resume_at = num_generated + self._pause
            self._pause = min(_MAX_PAUSE, 2 * self._pause)
        if num_accepted:
            self._pause, self._has_failed = _FIRST_PAUSE, False

    @property
    def acceptance(self) -> float:
        """Acceptance rate of draft tokens, from 0 to 1."""
        return self._num_accepted / self._num_drafts


class Speculator:
    """The engine's proposer together with acceptance statistics of its drafts."""

    def __init__(
        self, proposer: Proposer, depth: int, *, num_drafts: int | None = None, costs: DraftCosts | None = None
    ) -> None:
        """``depth``: maximum draft depth of a request per step. ``num_drafts``: maximum draft tokens over all branches;
        None for chains. ``costs``: None to draft regardless of cost, so that steps do not depend on the machine's
        speed.
        """
        self.proposer, self._costs = proposer, costs
        self._device_proposer = proposer if isinstance(proposer, AheadProposer) else None
        """The proposer, if it can draft on the device."""
        self.stats = SpeculationStats()
        self._depth, self._num_drafts = depth, num_drafts
        self._lengths: dict[str, DraftLength] = {}
        self._num_accepted, self._num_verified = 0.0, 0.0
        """Exponentially weighted sums of accepted and verified draft tokens over all requests."""
        self._has_counted = False
        """Whether the next step was already counted as unprofitable."""
        self._drafts_next = True
        """Last result of :meth:`drafts_next`."""
        self._counts_next: dict[str, int] = {}
        """Draft depth of each request, determined by the last :meth:`drafts_next`."""
        self._was_refused = False
        """Whether the last :meth:`draft_ahead` failed to start drafts that were wanted."""
        self.last_draft_s = 0.0
        """Duration of the last :meth:`propose` in seconds."""

    def propose(self, requests: Sequence[Request], *, is_recorded: bool = False) -> dict[str, Drafts]:
        """Return request id -> draft tokens for the running requests that speculate in this step.

        ``is_recorded``: ignore costs, so that recordings of equal requests have equal steps.
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
        """Return whether :meth:`draft_ahead` drafts for ``request``; :meth:`propose` then need not wait for the
        device.
        """
        if self._was_refused or self._device_proposer is None:
            return False
        return self._device_proposer.drafts_ahead(request)

    def drafts_next(self, requests: Sequence[Request]) -> bool:
        """Return whether the step after the in-flight one, with the running ``requests``, may have drafts."""
        counts, self._has_counted = self._counts(requests), False
        self._counts_next = {request.id: count for request, count in counts}
        self._drafts_next = any(self._counts_next.values()) and self._pays(counts)
        self._has_counted = not self._drafts_next
        return self._drafts_next

    def is_behind(self, requests: Sequence[Request]) -> bool:
        """Return whether the draft model lags so far behind that :meth:`catch_up` is due, even without drafts."""
        return self._device_proposer is not None and self._device_proposer.is_behind(requests)

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Compute missing rows of the draft model, see :meth:`.AheadProposer.catch_up`."""
        assert self._device_proposer is not None, "only a device proposer can be behind"
        begin = time.perf_counter()
        self._device_proposer.catch_up(requests)
        self.stats.draft_seconds += time.perf_counter() - begin

    def draft_ahead(self, plan: StepPlan, requests: Sequence[Request], sampled: Tensor) -> int:
        """Start drafting for the requests of the in-flight step, see :meth:`.AheadProposer.draft_ahead`.

        Returns 0 if the proposer cannot draft on the device.
        """
        if self._device_proposer is None or not self._drafts_next:
            return 0
        begin = time.perf_counter()
        counts = [(request, self._counts_next.get(request.id, 0)) for request in requests]
        num_steps = self._device_proposer.draft_ahead(plan, counts, sampled)
        self._was_refused = num_steps == 0
        self.stats.draft_seconds += time.perf_counter() - begin
        return num_steps

    def read_ahead(self) -> Mapping[str, Sequence[int]]:
        """Return the tokens of the taken drafts, see :meth:`.AheadProposer.read_ahead`."""
        assert self._device_proposer is not None, "only a device proposer returns placeholders"
        return self._device_proposer.read_ahead()

    def record(self, request: Request, scheduled: ScheduledRequest) -> None:
        """Record the verification of the drafts of ``request`` in ``scheduled``."""
        depth = scheduled.num_drafts if not scheduled.tree else max(depths(scheduled.tree))
        self.stats.count(scheduled.num_drafts, depth, request.num_accepted)
        if (length := self._lengths.get(request.id)) is not None:
            length.update(request.num_generated, depth, request.num_accepted, scheduled.num_drafts)
            self._num_accepted = _DECAY_OF_ALL * self._num_accepted + request.num_accepted
            self._num_verified = _DECAY_OF_ALL * self._num_verified + scheduled.num_drafts

    def record_time(self, plan: StepPlan, seconds: float) -> None:
        """Record that the step ``plan`` took ``seconds``, including drafting."""
        if self._costs is not None:
            self._costs.record(plan, seconds)

    def forget(self, request: Request) -> None:
        """Drop the state of a finished request. Idempotent."""
        self._lengths.pop(request.id, None)
        self.proposer.forget(request.id)

    def state(self) -> dict[str, Any]:
        """Return the counters as JSON values."""
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
        """Return each request with its draft depth, assuming that drafting pays."""
        return [(request, self._wanted(request) if request.can_speculate else 0) for request in requests]

    def _pays(self, counts: Sequence[tuple[Request, int]], *, is_recorded: bool = False) -> bool:
        """Return whether drafting is expected to save more time than it takes; count steps in which it is not."""
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
