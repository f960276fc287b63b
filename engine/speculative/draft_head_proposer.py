"""DraftHeadProposer: proposes what an MTP layer or an EAGLE head predicts from the target's hidden states.

The head's keys and values are in pages of the target: a page of the head has the number, the owner and the prefix of
the target's page, so that a prefix hit of the target is one of the head. Before each step the head computes the rows
that the target has computed, with the target's hidden states, in place of those that it drafted with its own. Rows of
requests that decode without drafts wait until there are several, so that a head that does not pay costs little.

The row of position p reads the token at p + 1. The last row of a cached page therefore belongs to the request that
stored the page: one that continues the prefix differently drafts with it too, which cannot change an output.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from torch import Tensor

from tapscope.engine.execution.hidden_store import HiddenStore
from tapscope.engine.execution.model_runner import ModelRunner
from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import NO_TOKEN, ScheduledRequest, StepPlan
from tapscope.engine.sampling.sampler import Sampler
from tapscope.engine.scheduling.kv_cache_manager import KVCacheManager
from tapscope.engine.scheduling.step_builder import page_updates
from tapscope.engine.speculative.draft_sampling import Compute, draw_drafts

_MAX_WAITING = 64
"""Rows of a request that decodes without drafts for which the head waits."""


@dataclass(slots=True)
class _Drafting:
    """What the head computes for one request before one step of the target."""

    request: Request
    start: int
    """Next position of the head."""
    num_wanted: int
    """Draft tokens."""
    tokens: list[int] = field(default_factory=list)
    """Draft tokens so far."""
    is_stopped: bool = False
    """Whether the grammar allows no further token."""

    @property
    def num_waiting(self) -> int:
        """Rows that the target has computed and the head has not."""
        return max(0, self.request.num_computed - self.start)

    @property
    def is_unfinished(self) -> bool:
        """Whether it gets more draft tokens."""
        return len(self.tokens) < self.num_wanted and not self.is_stopped


class DraftHeadProposer:
    """The head's rows; its pages are those of ``cache``."""

    def __init__(
        self,
        runner: ModelRunner,
        hidden_states: HiddenStore,
        sampler: Sampler,
        compute: Compute,
        vocab_size: int,
        cache: KVCacheManager,
    ) -> None:
        """``runner``: the head's on rank 0; ``vocab_size``: columns of its logits; ``cache``: the target's."""
        self._sampler, self._compute, self._vocab_size = sampler, compute, vocab_size
        self._hidden_states, self._cache, self._max_tokens = hidden_states, cache, runner.max_tokens
        self._visits: dict[str, list[int]] = {}
        """Request id -> how often the head has computed each position."""
        self._index = 0

    def propose(self, requests: Sequence[tuple[Request, int]]) -> Mapping[str, Sequence[int]]:
        """As :meth:`.Proposer.propose`."""
        num_reserved = sum(request.is_decoding for request, _ in requests)
        drafting = [item for request, count in requests if (item := self._item(request, count, num_reserved))]
        self._index = 0
        while waiting := [item for item in drafting if item.num_waiting]:
            self._compute_rows(list(self._waiting_rows(waiting)))
        while unfinished := [item for item in drafting if item.is_unfinished]:
            for first in range(0, len(unfinished), self._max_tokens):
                self._compute_rows([(item, 1) for item in unfinished[first : first + self._max_tokens]])
        return {item.request.id: item.tokens for item in drafting if item.tokens}

    def forget(self, request_id: str) -> None:
        """The request has ended; its pages are the target's."""
        self._visits.pop(request_id, None)

    def _item(self, request: Request, count: int, num_reserved: int) -> _Drafting | None:
        """What to compute for ``request``; None for nothing. Allocates the pages of its draft tokens."""
        start = self._hidden_states.start(request.row, request.id)
        if start is None or start >= request.num_computed:
            return None
        count = min(count, self._cache.num_draft_rows(request, num_reserved))
        if count > 0:
            self._cache.allocate(request, request.num_computed + 1 + count)
            return _Drafting(request, start, count)
        if request.is_decoding and request.num_computed - start < _MAX_WAITING:
            return None
        return _Drafting(request, start, 0)

    def _waiting_rows(self, waiting: Sequence[_Drafting]) -> Iterator[tuple[_Drafting, int]]:
        """Rows of one step of the head, of those that the target has computed."""
        left = self._max_tokens
        for item in waiting:
            if left:
                count = min(item.num_waiting, left)
                left -= count
                yield item, count

    def _compute_rows(self, rows: list[tuple[_Drafting, int]]) -> None:
        """Compute one step of the head: the next rows of each request, and a draft token after the last one."""
        rows.sort(key=lambda each: each[1] > 1)  # as attention expects, see StepBuilder.plan
        sampling = [item for item, count in rows if self._samples(item, count)]
        plan = StepPlan(
            step=0,
            phase="draft",
            scheduled=tuple(self._scheduled(item, count) for item, count in rows),
            kv_pages_used=self._cache.num_used,
            greedy=all(item.request.params.is_plain for item in sampling),
            model="draft",
            draft_index=self._index,
        )
        self._index += 1
        drawn = iter(self._compute(plan, lambda logits: self._draw(logits, sampling)))
        for item, count in rows:
            for table in item.request.tables:  # not before: a step that fails may not have written them
                table.num_sent_pages = len(table.pages)
            samples = self._samples(item, count)
            item.start += count
            if samples:
                token = next(drawn)
                item.is_stopped = token == NO_TOKEN
                item.tokens += [] if item.is_stopped else [token]

    def _samples(self, item: _Drafting, count: int) -> bool:
        """Whether the last of the next ``count`` rows predicts a draft token."""
        return item.is_unfinished and item.start + count >= item.request.num_computed

    def _scheduled(self, item: _Drafting, count: int) -> ScheduledRequest:
        request, start, end = item.request, item.start, item.start + count
        tokens = request.tokens[start + 1 : end + 1] if start < request.num_computed else item.tokens[-1:]
        counts = self._visits.setdefault(request.id, [])
        counts += [0] * (end - len(counts))
        visits = tuple((len(list(run)), visit) for visit, run in groupby(counts[start:end]))
        counts[start:end] = [count + 1 for count in counts[start:end]]
        samples = self._samples(item, count)
        return ScheduledRequest(
            request=request.id,
            row=request.row,
            position=start,
            visits=visits,
            tokens=tuple(tokens),
            **page_updates(self._cache, request),
            num_logits=int(samples),
            samples=samples,
            prompt_length=len(request.prompt_ids),
            seed=None if request.params.is_greedy else request.seed,
        )

    def _draw(self, logits: Tensor, sampling: Sequence[_Drafting]) -> Tensor:
        requests = [(item.request, item.tokens) for item in sampling]
        return draw_drafts(self._sampler, logits, self._vocab_size, requests)
