"""DraftHeadProposer: draft tokens predicted by an MTP layer or EAGLE head from the target's hidden states.

The head's keys and values are stored in the target's pages: a page of the head shares number, owner and prefix with the
target's page, so a prefix hit of the target is also one of the head. Before each step, the head computes the rows that
the target has computed since, using the target's hidden states; these rows replace those drafted from its own states.
Rows of requests that decode without drafts are batched, so that a head that does not pay costs little.

The row at position p reads the token at p + 1. The last row of a cached page therefore depends on the request that
stored the page. A request that continues the prefix differently drafts with this row too, which cannot change its
output.

A tree (EAGLE-2, arXiv:2406.16858) grows by one level per step of the head. Of the candidates after the last level, the
``num_branches`` with the highest joint probability get a row, which predicts ``num_branches`` further candidates. The
most probable candidates of all levels become the drafts.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace
from torch import Tensor

from tapscope.engine.execution.draft_chains import LaunchedDrafts
from tapscope.engine.execution.draft_runner import DraftRunner
from tapscope.engine.execution.hidden_store import MAX_WAITING, HiddenStore
from tapscope.engine.kv_cache.draft_tree import branch, branch_hash, is_chain
from tapscope.engine.requests.drafts import Drafts
from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import NO_TOKEN, ScheduledRequest, StepPlan, pending_drafts
from tapscope.engine.sampling.sampler import Sampler
from tapscope.engine.scheduling.kv_cache_manager import KVCacheManager
from tapscope.engine.scheduling.step_builder import page_updates
from tapscope.engine.speculative.draft_sampling import Compute, draw_candidates, draw_drafts
from tapscope.engine.speculative.visit_counts import VisitCounts


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A candidate draft token."""

    token: int
    parent: int
    """Index of the preceding candidate; -1 for the request's last token."""
    score: float
    """Joint log-probability of this candidate and its ancestors."""


@dataclass(slots=True)
class _Drafting:
    """Work of the head for one request before one step of the target."""

    request: Request
    start: int
    """Next position that the head computes, among those that the target has computed."""
    depth: int
    """Maximum number of tree levels."""
    num_drafts: int
    """Maximum number of draft tokens."""
    candidates: list[_Candidate] = field(default_factory=list)
    level: list[int] = field(default_factory=list)
    """Candidates of the last level that get a row."""
    num_levels: int = 0
    """Number of levels so far."""
    rows: list[int] = field(default_factory=list)
    """Candidates that have a row of the head, in the order in which the rows are stored."""

    @property
    def num_waiting(self) -> int:
        """Number of rows that the target has computed and the head has not."""
        return max(0, self.request.num_computed - self.start)

    @property
    def is_unfinished(self) -> bool:
        """Whether the tree needs another level."""
        return self.num_levels < self.depth and bool(self.level or not self.num_levels)

    @property
    def tree(self) -> tuple[int, ...]:
        """Parent index of each row of the head, see :attr:`.ScheduledRequest.tree`."""
        place = {candidate: row for row, candidate in enumerate(self.rows)} | {-1: -1}
        return tuple(place[self.candidates[each].parent] for each in self.rows)

    def tokens_up_to(self, candidate: int) -> list[int]:
        """Return the draft tokens on the path to ``candidate``, inclusive; empty for -1."""
        parents = [each.parent for each in self.candidates]
        return [self.candidates[each].token for each in branch(parents, candidate)]

    def add_level(self, candidates: Sequence[tuple[int, Sequence[tuple[int, float]]]], num_branches: int) -> None:
        """Add a level: ``candidates`` has (parent, children) with the (token, log-probability) of each child."""
        first = len(self.candidates)
        for parent, after in candidates:
            before = 0.0 if parent < 0 else self.candidates[parent].score
            self.candidates += [_Candidate(token, parent, before + score) for token, score in after]
        new = sorted(range(first, len(self.candidates)), key=lambda each: -self.candidates[each].score)
        self.level, self.num_levels = new[:num_branches], self.num_levels + 1

    def drafts(self) -> Drafts:
        """Return the ``num_drafts`` most probable candidates.

        Parents come before children, which are never more probable.
        """
        best = sorted(range(len(self.candidates)), key=lambda each: -self.candidates[each].score)[: self.num_drafts]
        place = {candidate: index for index, candidate in enumerate(best)} | {-1: -1}
        chosen = [self.candidates[each] for each in best]
        parents = tuple(place[each.parent] for each in chosen)
        return Drafts(tuple(each.token for each in chosen), () if is_chain(parents) else parents)


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Drafts that the device computes after a step."""

    drafts: LaunchedDrafts
    starts: Mapping[str, tuple[int, int]]
    """Request -> (index among the drafts, position of the request's first row in the step)."""


class DraftHeadProposer:
    """Schedules the rows of the draft head, whose pages belong to ``cache``."""

    def __init__(
        self,
        runner: DraftRunner,
        hidden_states: HiddenStore,
        sampler: Sampler,
        compute: Compute,
        vocab_size: int,
        cache: KVCacheManager,
        *,
        num_branches: int,
        max_drafts: int,
    ) -> None:
        """``runner``: the head's runner on rank 0. ``vocab_size``: columns of the head's logits. ``cache``: the
        target's. ``num_branches``: candidates after each token, 1 for chains. ``max_drafts``: maximum drafts of a
        request per step.
        """
        self._sampler, self._compute, self._vocab_size, self._runner = sampler, compute, vocab_size, runner
        self._hidden_states, self._cache, self._max_tokens = hidden_states, cache, runner.max_tokens
        self._num_branches, self._max_drafts = num_branches, max_drafts
        self._max_places = runner.page_tables[0].shape[1] * runner.cache_config.page_size
        self._visits: dict[str, VisitCounts] = {}
        self._index = 0
        self._ahead: _Ahead | None = None
        """Drafts that were started and not yet taken."""
        self._taken: _Ahead | None = None

    def propose(self, requests: Sequence[tuple[Request, int]]) -> Mapping[str, Drafts]:
        """Compute the head's missing rows and draft, see :meth:`.Proposer.propose`."""
        self._ahead = None
        num_decoding = sum(request.is_decoding for request, _ in requests)
        prompts = [request for request, _ in requests if not request.is_decoding]
        each = (self._item(request, count, num_decoding, prompts) for request, count in requests)
        drafting = [item for item in each if item is not None]
        self._index = 0
        while waiting := [item for item in drafting if item.num_waiting]:
            self._compute_rows(list(self._waiting_rows(waiting)))
        at_once = max(1, self._max_tokens // self._num_branches)
        while unfinished := [item for item in drafting if item.is_unfinished]:
            for first in range(0, len(unfinished), at_once):
                self._compute_rows([(item, 0) for item in unfinished[first : first + at_once]])
        return {item.request.id: item.drafts() for item in drafting if item.candidates}

    def forget(self, request_id: str) -> None:
        """Drop the state of a finished request; its pages belong to the target."""
        self._visits.pop(request_id, None)

    def drafts_ahead(self, request: Request) -> bool:
        """Return whether the device can draft for the request, which requires argmax sampling.

        See :meth:`.AheadProposer.drafts_ahead`.
        """
        return self._runner.chains is not None and request.is_plain and not request.forced_token_ids

    def is_behind(self, requests: Sequence[Request]) -> bool:
        """Return whether :meth:`catch_up` is due, see :meth:`.AheadProposer.is_behind`."""
        starts = ((request, self._hidden_states.start(request.row, request.id)) for request in requests)
        return any(start is not None and request.num_computed - start >= MAX_WAITING - 1 for request, start in starts)

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Compute the head's missing rows, see :meth:`.AheadProposer.catch_up`."""
        self._index = 0
        starts = ((request, self._hidden_states.start(request.row, request.id)) for request in requests)
        items = [_Drafting(request, start, 0, 0) for request, start in starts if start is not None]
        while waiting := [item for item in items if item.num_waiting]:
            self._compute_rows(list(self._waiting_rows(waiting)))

    def draft_ahead(self, plan: StepPlan, requests: Sequence[tuple[Request, int]], sampled: Tensor) -> int:
        """Start drafting on the device, including rows of the head that are still missing.

        See :meth:`.AheadProposer.draft_ahead`.
        """
        if self._runner.chains is None:
            return 0
        prompts = [request for request, _ in requests if not request.is_decoding]
        num_left = len(requests) - len(prompts)
        items, taken, rows = list[ScheduledRequest](), list[Request](), list[int]()
        chosen, starts, end = list[int](), dict[str, tuple[int, int]](), 0
        for item, (request, count) in zip(plan.scheduled, requests, strict=True):
            end += item.num_logits
            if (start := self._chain_start(item, request)) is None:
                continue
            num_left -= 1
            if count and self._has_room(request, item, num_left, prompts):
                self._cache.allocate(request, item.position + item.num_drafts + self._max_drafts)
                starts[request.id] = len(chosen), item.position
                chosen.append(len(items))
            known = request.tokens[start + 1 : item.position + 1]
            updates = page_updates(self._cache, request)
            items.append(replace(item, position=start, tokens=(*known, *item.tokens), **updates))
            rows += range(end - item.num_sampled, end)
            taken.append(request)
        drafted = dataclasses.replace(plan, scheduled=tuple(items), model="draft", phase="draft")
        if not chosen or not self._runner.can_chain(drafted, len(chosen)):
            return 0
        drafts = self._runner.launch_chains(drafted, chosen, sampled, rows)
        if drafts is None:
            return 0
        for request in taken:
            for table in request.tables:  # not before: a step that fails may not have written them
                table.num_sent_pages = len(table.pages)
        self._ahead = _Ahead(drafts, starts)
        return self._max_drafts

    def take_ahead(self, requests: Sequence[tuple[Request, int]]) -> Mapping[str, Drafts] | None:
        """Return placeholders of the started drafts, see :meth:`.AheadProposer.take_ahead`."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        self._taken, found = ahead, {}
        for request, count in requests:
            _, start = ahead.starts.get(request.id, (0, -1))
            if count and request.num_computed == start + 1 + request.num_accepted:
                found[request.id] = Drafts(pending_drafts(min(count, self._max_drafts)))
        return found

    def read_ahead(self) -> Mapping[str, Sequence[int]]:
        """Return the tokens of the taken drafts, see :meth:`.AheadProposer.read_ahead`."""
        assert self._taken is not None, "the caller has drafts to read"
        tokens = self._taken.drafts.wait()
        return {request: tokens[place] for request, (place, _) in self._taken.starts.items()}

    def _chain_start(self, item: ScheduledRequest, request: Request) -> int | None:
        """Return the first row that the head computes along with those of ``item``; None if a chain is not possible."""
        if request.row != item.row or not self.drafts_ahead(request):  # the row is -1 once the request has ended
            return None
        if item.tree or not item.samples or len(item.tokens) != item.num_drafts + 1:
            return None
        start = self._hidden_states.start(item.row, request.id)
        return start if start is not None and item.position - start <= MAX_WAITING else None

    def _has_room(
        self, request: Request, item: ScheduledRequest, num_decoding: int, prompts: Sequence[Request]
    ) -> bool:
        """Return whether pages are available for a chain of drafts after the drafts of ``item``.

        Pages stay reserved for other requests, as in :meth:`.KVCacheManager.num_draft_rows`.
        """
        num_rows = item.num_drafts + self._max_drafts
        fits = item.position + num_rows <= self._max_places
        return fits and num_rows <= 1 + self._cache.num_draft_rows(request, num_decoding, prompts)

    def _item(self, request: Request, depth: int, num_decoding: int, prompts: Sequence[Request]) -> _Drafting | None:
        """Return the work for ``request``, None if there is none. Allocates the pages of its draft tokens."""
        start = self._hidden_states.start(request.row, request.id)
        if start is None or start >= request.num_computed:
            return None
        if depth > 0:
            num_rows = min(
                self._cache.num_draft_rows(request, num_decoding, prompts), self._max_places - request.num_computed - 1
            )
            depth = min(depth, 1 + num_rows // self._num_branches if self._num_branches > 1 else num_rows)
            num_drafts = min(num_rows, self._max_drafts if self._num_branches > 1 else depth)
            if num_drafts > 0:
                num_rows = max(num_drafts, self._num_branches * (depth - 1))
                self._cache.allocate(request, request.num_computed + 1 + num_rows)
                return _Drafting(request, start, depth, num_drafts)
        if request.is_decoding and request.num_computed - start < MAX_WAITING:
            return None
        return _Drafting(request, start, 0, 0)

    def _waiting_rows(self, waiting: Sequence[_Drafting]) -> Iterator[tuple[_Drafting, int]]:
        """Yield (item, number of rows) for one step of the head over rows that the target has computed."""
        left = self._max_tokens
        for item in waiting:
            if left:
                count = min(item.num_waiting, left)
                left -= count
                yield item, count

    def _compute_rows(self, rows: Sequence[tuple[_Drafting, int]]) -> None:
        """Run one step of the head and add the candidates that it predicts.

        ``rows``: for each item, the number of rows to compute that the target has computed; 0 for the rows of its last
        level.
        """
        planned = [self._known_rows(item, count) if count else self._level_rows(item) for item, count in rows]
        # requests with one row first, as attention expects, see StepBuilder.plan
        order = sorted(range(len(rows)), key=lambda i: len(planned[i][0].tokens) > 1 or bool(planned[i][0].tree))
        sampling = [(rows[i][0], candidate) for i in order for candidate in planned[i][1]]
        plan = StepPlan(
            step=0,
            phase="draft",
            scheduled=tuple(planned[i][0] for i in order),
            kv_pages_used=self._cache.num_used,
            greedy=all(item.request.params.is_plain for item, _ in sampling),
            model="draft",
            draft_index=self._index,
        )
        self._index += 1
        after = iter(self._candidates(plan, sampling))
        for i in order:
            (item, count), (_, parents) = rows[i], planned[i]
            for table in item.request.tables:  # not before: a step that fails may not have written them
                table.num_sent_pages = len(table.pages)
            item.start += count
            if parents:
                item.add_level([(parent, next(after)) for parent in parents], self._num_branches)

    def _known_rows(self, item: _Drafting, count: int) -> tuple[ScheduledRequest, list[int]]:
        """Return the next ``count`` rows that the target has computed, and the candidates that get children."""
        samples = item.is_unfinished and item.start + count >= item.request.num_computed
        tokens = item.request.tokens[item.start + 1 : item.start + count + 1]
        return self._scheduled(item, item.start, tokens, (), num_logits=int(samples)), [-1] if samples else []

    def _level_rows(self, item: _Drafting) -> tuple[ScheduledRequest, list[int]]:
        """Return the rows of the last level, and the candidates that get children."""
        place, level = item.request.num_computed + len(item.rows), item.level
        item.rows += level
        tokens = [item.candidates[each].token for each in level]
        if self._num_branches == 1:
            return self._scheduled(item, place, tokens, (), num_logits=len(tokens)), level
        start = item.request.num_computed
        branches = tuple(branch_hash(start, item.tokens_up_to(candidate)) for candidate in level)
        rows = self._scheduled(item, place, tokens, item.tree, num_logits=len(tokens))
        return replace(rows, branches=branches), level

    def _scheduled(
        self, item: _Drafting, place: int, tokens: Sequence[int], tree: tuple[int, ...], *, num_logits: int
    ) -> ScheduledRequest:
        request = item.request
        rows = ScheduledRequest(
            request=request.id,
            row=request.row,
            position=place,
            visits=(),
            tokens=tuple(tokens),
            tree=tree,
            **page_updates(self._cache, request),
            num_logits=num_logits,
            samples=num_logits > 0,
            prompt_length=len(request.prompt_ids),
            seed=None if request.params.is_greedy else request.seed,
        )
        visits = self._visits.setdefault(request.id, VisitCounts()).add(rows.row_positions)
        return replace(rows, visits=visits)

    def _candidates(self, plan: StepPlan, sampling: Sequence[tuple[_Drafting, int]]) -> list[list[tuple[int, float]]]:
        """Return, for each candidate in ``sampling``, the (token, log-probability) pairs that may follow."""
        requests = [(item.request, item.tokens_up_to(candidate)) for item, candidate in sampling]
        if self._num_branches == 1:
            drawn = self._compute(plan, lambda logits: draw_drafts(self._sampler, logits, self._vocab_size, requests))
            return [[(token, 0.0)] if token != NO_TOKEN else [] for token in drawn]
        draws: list[tuple[Tensor, Tensor]] = []

        def sample(logits: Tensor) -> Tensor:
            args = self._sampler, logits, self._vocab_size, requests
            draws.append(draw_candidates(*args, self._num_branches))
            return draws[0][0][:, 0]

        self._compute(plan, sample)
        if not sampling:
            return []
        tokens, scores = (each.tolist() for each in draws[0])
        pairs = (zip(*each, strict=True) for each in zip(tokens, scores, strict=True))
        return [[(token, score) for token, score in row if score > -math.inf] for row in pairs]
