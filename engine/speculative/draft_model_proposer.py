"""DraftModelProposer: proposes what a smaller checkpoint generates after a request's tokens.

The draft model has a cache of its own, with page tables and a prefix tree that do not depend on the target's: a prefix
hit, a preemption or a pause of the target changes nothing here. For each request it keeps a *draft request*, whose
computed tokens catch up with the known ones before it generates. Tokens that the target did not accept are removed
first, and only confirmed pages enter the tree. Of a model with recurrent state, each draft token leaves its state in a
slot of its own: the request goes back to the one after the last accepted token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
from torch import Tensor

from tapscope.engine.execution.model_runner import ModelRunner
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.drafts import Drafts
from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import NO_TOKEN
from tapscope.engine.sampling.sampler import Sampler
from tapscope.engine.scheduling.kv_cache_manager import KVCacheManager
from tapscope.engine.scheduling.state_group import StateGroup
from tapscope.engine.scheduling.step_builder import StepBuilder
from tapscope.engine.speculative.draft_sampling import Compute, draw_drafts
from tapscope.engine.speculative.visit_counts import VisitCounts

_PARAMS = SamplingParams()


class DraftModelProposer:
    """The draft model's requests, rows and pages."""

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        compute: Compute,
        vocab_size: int,
        *,
        max_num_seqs: int,
        state_interval: int,
    ) -> None:
        """``runner``: the draft model's on rank 0; ``vocab_size``: columns of the target's logits; ``state_interval``:
        positions between checkpoints of its recurrent state."""
        self._sampler, self._compute, self._vocab_size = sampler, compute, vocab_size
        self._model_config = runner.model.config
        sizes = runner.cache_config
        self._max_tokens, self._page_size = runner.max_tokens, sizes.page_size
        shares = self._model_config.is_prefix_shareable
        self._states: StateGroup | None = None
        if sizes.num_state_slots:
            self._states = StateGroup(
                sizes.num_state_slots, sizes.page_size, state_interval, prefix_cache=shares, num_reserved=max_num_seqs
            )
            max_num_seqs = min(max_num_seqs, self._states.max_num_seqs)
        self._cache = KVCacheManager(
            sizes.num_pages,
            sizes.page_size,
            prefix_cache=shares,
            window=sizes.window,
            windowed=sizes.windowed_pools,
            states=self._states,
        )
        self._free_rows, self._max_num_seqs = list(range(max_num_seqs)), max_num_seqs
        self._requests: dict[str, Request] = {}
        """Draft requests, the one used last at the end."""
        self._num_known: dict[str, int] = {}
        """How many of a draft request's tokens are the target's; the others are drafts."""
        self._visits: dict[str, VisitCounts] = {}

    def propose(self, requests: Sequence[tuple[Request, int]]) -> Mapping[str, Drafts]:
        """As :meth:`.Proposer.propose`."""
        drafting: dict[str, tuple[Request, Request, int]] = {}
        for request, count in requests:
            most = min(count, self._model_config.max_positions - len(request.tokens))
            is_known = max(request.tokens) < self._model_config.vocab_size
            if most > 0 and is_known and len(drafting) < self._max_num_seqs:
                drafting[request.id] = (request, self._caught_up(request), most)
        index = 0
        while unfinished := [each for each in drafting.values() if len(each[1].tokens) - len(each[0].tokens) < each[2]]:
            for name in self._step(unfinished, keep=drafting, index=index):
                request, draft, _ = drafting[name]
                drafting[name] = (request, draft, len(draft.tokens) - len(request.tokens))
            index += 1
        return {
            name: Drafts(tuple(draft.tokens[len(request.tokens) :])) for name, (request, draft, _) in drafting.items()
        }

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._visits.pop(request_id, None)
        self._free(request_id)

    def _free(self, request_id: str) -> None:
        """Free the request's row and pages; the pages stay in the prefix tree until they are needed."""
        draft = self._requests.pop(request_id, None)
        if draft is not None:
            self._cache.release(draft)
            self._free_rows.append(draft.row)
            del self._num_known[request_id]

    def check(self) -> None:
        """Raise InvariantError for a page that is lost, or held twice or wrongly."""
        self._cache.check(list(self._requests.values()))

    def _caught_up(self, request: Request) -> Request:
        """The draft request of ``request`` with its known tokens, without drafts that were not accepted."""
        draft = self._requests.pop(request.id, None)
        if draft is None:
            if not self._free_rows:
                self._free(next(iter(self._requests)))
            draft = Request(id=request.id, prompt_ids=request.prompt_ids, params=_PARAMS, cache_salt=request.cache_salt)
            draft.row = self._free_rows.pop()
        self._requests[request.id] = draft
        confirmed = min(draft.num_computed, self._num_known.get(request.id, 0))
        same = next(
            (i for i in range(draft.num_computed) if i >= len(request.tokens) or draft.tokens[i] != request.tokens[i]),
            draft.num_computed,
        )
        kept = min(same, len(request.tokens) - 1)
        draft.tokens, self._num_known[request.id] = list(request.tokens), len(request.tokens)
        if kept < confirmed:
            self._cache.release(draft)
        elif kept > confirmed:
            draft.num_computed, draft.accepted_drafts = kept, tuple(range(kept - confirmed))
            self._cache.cache_full_pages(draft)
        else:
            draft.num_computed = kept
        draft.state.is_drafting = False
        if self._states is not None:
            self._states.free_drafts(draft)
        self._cache.match_prefix(draft)
        return draft

    def _step(
        self, drafting: Sequence[tuple[Request, Request, int]], *, keep: Mapping[str, object], index: int
    ) -> list[str]:
        """Compute one step of the draft model; returns the requests that cannot get more drafts."""
        builder = StepBuilder(self._cache, self._max_tokens, self._page_size, all_logits=False)
        stopped, sampling = [], []
        for request, draft, _ in drafting:
            if builder.num_rows_left == 0:
                break
            num_rows = self._num_computable_rows(draft, keep)
            if num_rows < 1:
                stopped.append(request.id)
                continue
            builder.add(draft, num_rows)
            if builder.planned[-1][1].samples:
                sampling.append((request, draft))
        if not builder.planned:
            return stopped
        plan = builder.plan(0, None)
        visited = tuple(
            msgspec.structs.replace(
                item, visits=self._visits.setdefault(item.request, VisitCounts()).add(item.row_positions)
            )
            for item in plan.scheduled
        )
        plan = replace(plan, scheduled=visited, model="draft", phase="draft", draft_index=index)
        tokens = iter(self._compute(plan, lambda logits: self._draw(logits, sampling)))
        for draft, scheduled in builder.planned:
            draft.num_computed = scheduled.position + len(scheduled.tokens)
            if draft.num_computed <= self._num_known[draft.id]:
                self._cache.cache_full_pages(draft)
            draft.state.is_drafting = scheduled.samples
            token = next(tokens) if scheduled.samples else None
            if token == NO_TOKEN:
                stopped.append(draft.id)
            elif token is not None:
                draft.tokens.append(token)
        return stopped

    def _num_computable_rows(self, draft: Request, keep: Mapping[str, object]) -> int:
        """Rows that fit the pages and states, after freeing those of requests that are not drafted for now."""
        while (num_rows := self._num_free_rows_of(draft)) < 1:
            idle = next((name for name in self._requests if name not in keep), None)
            if idle is None:
                break
            self._free(idle)
        return num_rows

    def _num_free_rows_of(self, draft: Request) -> int:
        if self._states is not None and draft.state.is_drafting and self._states.num_draft_slots < 1:
            return 0
        return self._cache.num_computable_rows(draft)

    def _draw(self, logits: Tensor, sampling: Sequence[tuple[Request, Request]]) -> Tensor:
        requests = [(request, draft.tokens[len(request.tokens) :]) for request, draft in sampling]
        return draw_drafts(self._sampler, logits, self._vocab_size, requests)
