"""Scheduler: which tokens each step computes. Rank 0 only.

One rule: *computed tokens catch up with known tokens*. A new request lags by its whole prompt, a running one by the
token sampled last, a preempted one by all it had; so prefill, decode, prefix hits and recompute are the same thing, and
requests join at any step. A step has a budget of rows: requests that decode come first, one row each, then prompts take
what is left, in chunks.

Requests have one total order, their *urgency*: the higher priority first, then the older. Waiting makes a request older
than what arrives later with a higher priority, so everything is served in the end. The generations of one parent take
turns with other parents (:mod:`.waiting_queue`). The most urgent waiting request enters when the pages of all
its known tokens fit; when a running request needs a page and none is to be had, the least urgent running one is
preempted: it gives up its pages and waits to be computed again, where its prefix may still be.
"""

import heapq
import time
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter

from tapscope.core.errors import InvariantError, UsageError
from tapscope.engine.params.validators import add_up
from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import Share, StepPlan
from tapscope.engine.scheduling.kv_cache_manager import Paging
from tapscope.engine.scheduling.scheduler_config import Policy
from tapscope.engine.scheduling.scheduler_stats import Counters
from tapscope.engine.scheduling.step_builder import Draft
from tapscope.engine.scheduling.waiting_queue import WaitingQueue

_require = partial(add_up, "scheduler")
_urgency = attrgetter("urgency")


class Scheduler:
    """Owns every live request and every page."""

    def __init__(self, policy: Policy, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.policy = policy
        self.waiting = WaitingQueue(policy.ageing_steps)
        """Preempted ones among them."""
        self.running: list[Request] = []
        """Most urgent first."""
        self.paging = Paging(policy.num_pages, policy.page_size, prefix_cache=policy.prefix_cache, window=policy.window)
        self.counters = Counters()
        self._eos = frozenset(policy.eos_token_ids)
        self._clock = clock
        self._free_rows = list(range(policy.max_running))
        self._planned: list[list[tuple[Request, Share]]] = []
        """Of each step that was planned and not committed, in order."""
        self._next_step = 0
        self._by_id: dict[str, Request] = {}

    @property
    def has_work(self) -> bool:
        """Whether any request is live."""
        return bool(self.waiting or self.running)

    @property
    def num_steps(self) -> int:
        """Steps planned so far."""
        return self._next_step

    def live(self) -> Iterator[Request]:
        """Running requests, then waiting ones, the most urgent first."""
        yield from self.running
        yield from self.waiting

    def is_live(self, request_id: str) -> bool:
        """Whether a request of this id runs or waits."""
        return request_id in self._by_id

    def validate(self, request: Request) -> None:
        """Raise UsageError when ``request`` can never run: its id is taken, or it needs more pages than there are."""
        if self.is_live(request.id):
            raise UsageError(f"request id {request.id!r} is in use by a live request; choose another or wait for it")
        needed, policy = self.paging.most_pages(request.max_positions), self.policy
        if needed > policy.num_pages:
            raise UsageError(
                f"request {request.id!r} needs {needed} pages of {policy.page_size} tokens (prompt "
                f"{len(request.prompt_ids)}, {request.max_new_tokens} new) but the cache has {policy.num_pages}; "
                "raise num_pages or shorten the request"
            )

    def add(self, request: Request) -> None:
        """Queue a request that passed :meth:`validate`."""
        request.submitted_s = self._clock()
        self._by_id[request.id] = request
        self.waiting.add(request, self._next_step)

    def abort(self, request_id: str, reason: str = "") -> Request | None:
        """Take a live request out, whatever state it is in; None when there is none of this id."""
        request = self._by_id.get(request_id)
        if request is not None:
            self._end(request, "abort", reason)
        return request

    def expire(self) -> list[Request]:
        """Take out the requests that have waited or run for too long; call it before each step."""
        late = []
        if self.policy.has_timeouts:
            now = self._clock()
            for request in list(self.live()):
                if (reason := self.policy.overdue(request.submitted_s, request.started_s, now)) is not None:
                    self._end(request, "abort", reason)
                    late.append(request)
        return late

    def plan(self, *, all_logits: bool = False, epoch: int | None = None) -> StepPlan:
        """Decide the next step; needs :attr:`has_work`. A plan that is not committed is planned anew."""
        for request, _ in (pair for planned in self._planned for pair in planned):
            request.num_sent = 0  # that step failed, perhaps before its page tables were entered
        draft = self._draft(all_logits=all_logits)
        num_preempted = self.counters.num_preemptions
        for request in sorted(self.running, key=lambda request: not request.is_decoding):
            self._schedule(request, draft)
        if num_preempted == self.counters.num_preemptions:
            self._admit(draft)
        self._planned = [draft.planned]
        if not draft.planned:
            raise InvariantError(f"step {self._next_step} has nothing to compute for {len(self.running)} requests")
        self._next_step += 1
        return draft.plan(self._next_step - 1, epoch)

    def plan_ahead(self, epoch: int | None = None) -> StepPlan | None:
        """Plan the step that follows the one planned last, while that is still being computed.

        Its tokens are not known yet (:data:`.PENDING`), only who will have one: that is enough
        where every running request decodes, none can join, and there are pages. None where more must be known. A
        request that turns out to be finished has a row in the step all the same, whose token is dropped.
        """
        planned = [(request, share) for request, share in self._planned[-1] if request.finish_reason is None]
        if len(planned) != len(self.running) or (self.waiting and self._free_rows):
            return None
        if not all(_can_go_on_unseen(request, share) for request, share in planned):
            return None
        going_on = [(r, share) for r, share in planned if r.num_generated + 1 < r.max_new_tokens]
        needed = sum(self.paging.lacks_page(request, share.position + 1) for request, share in going_on)
        if not going_on or needed > self.paging.num_available:
            return None
        draft = self._draft(all_logits=False)
        for request, share in going_on:
            draft.add_next(request, share)
        self._planned.append(draft.planned)
        self._next_step += 1
        return draft.plan(self._next_step - 1, epoch)

    def _draft(self, *, all_logits: bool) -> Draft:
        return Draft(self.paging, self.policy.max_tokens, self.policy.page_size, all_logits=all_logits)

    def commit(self, sampled: Sequence[int]) -> list[Request]:
        """The oldest step planned was computed: append a token to each request that caught up.

        Returns the requests that are finished. ``sampled`` has one token for each share that samples, in the plan's
        order; what a request aborted since the plan would have got is dropped.
        """
        tokens = iter(sampled)
        finished: list[Request] = []
        for request, share in self._planned.pop(0):
            token = next(tokens) if share.samples else None
            if request.finish_reason is not None:
                continue
            self.counters.count(share, len(request.prompt_ids))
            request.record(share.position, len(share.tokens))
            self.paging.settle(request)
            if token is not None:
                before = request.num_generated
                request.append(token, self._eos)
                self.counters.decode_tokens += request.num_generated - before
            if request.finish_reason is not None:
                self._end(request, request.finish_reason, request.reason)
                finished.append(request)
        if self.policy.check:
            self.check()
        return finished

    def flush(self) -> int:
        """Empty the prefix cache but for what running requests hold; returns how many pages that freed."""
        return self.paging.flush()

    def recompute(self) -> None:
        """Forget every computed token, of running requests too: for weights that changed."""
        for request in list(self.running):
            self._preempt(request)
        self.flush()

    def check(self) -> None:
        """Walk everything; raises InvariantError for the first thing that does not add up. For between two steps."""
        self.paging.check(self.running)
        rows = sorted([*self._free_rows, *(request.row for request in self.running)])
        _require(rows == list(range(self.policy.max_running)), f"rows {rows} are not every row once")
        names = sorted(request.id for request in self.live())
        _require(names == sorted(self._by_id), "not every live request is known by its id once")
        for queue in (self.running, self.waiting.ready):
            _require(queue == sorted(queue, key=_urgency), "a queue is out of order")
        for request in self.live():
            _require(request.finish_reason is None, f"{request.id!r} is finished and still live")
            _require(request.num_computed < len(request.tokens), f"{request.id!r} has nothing to compute")
        for request in self.waiting:
            _require(request.holds_nothing, f"{request.id!r} waits and holds something")
        _require(len(self.waiting) == sum(1 for _ in self.waiting), "the waiting queue's length is wrong")

    def _schedule(self, request: Request, draft: Draft) -> None:
        """Give a running request its share of the step, as far as rows and pages go."""
        if request.row < 0 or draft.num_left == 0:
            return
        self._match(request)
        if draft.is_coming(request):
            return
        while (room := self.paging.room(request)) < 1:
            victim = next(other for other in reversed(self.running) if not draft.holds(other))
            if victim is request and draft.planned and not request.is_decoding:
                return  # less urgent ones decode in this step; in the next they are the ones to give way
            self._preempt(victim)
            if victim is request:
                return
        draft.add(request, room)

    def _admit(self, draft: Draft) -> None:
        """Let waiting requests in, in order of urgency, until one does not fit."""
        num_passed = 0
        while num_passed < len(self.waiting.ready) and self._free_rows and draft.num_left > 0:
            request = self.waiting.ready[num_passed]
            self._match(request)
            if draft.is_coming(request):
                self._unmatch(request)
                num_passed += 1
                continue
            reserve = int(self.policy.watermark * self.policy.num_pages) if self.running else 0
            missing = sum(self.paging.missing(other) for other in self.running) + self.paging.missing(request)
            if missing + reserve > self.paging.num_available:
                self._unmatch(request)
                return
            self._enter(request)
            self._schedule(request, draft)

    def _match(self, request: Request) -> None:
        """Skip what the prefix cache has; what it saves a preempted request is no saving, it was computed for it."""
        before = request.num_computed
        self.paging.match(request)
        if request.num_preemptions == 0:
            request.cached_tokens += request.num_computed - before
            self.counters.cached_tokens += request.num_computed - before

    def _unmatch(self, request: Request) -> None:
        """The waiting request goes on waiting."""
        if request.num_preemptions == 0:
            self.counters.cached_tokens -= request.cached_tokens
            request.cached_tokens = 0
        self.paging.release(request)

    def _enter(self, request: Request) -> None:
        if request.started_s is None:
            request.started_s = self._clock()
        self.waiting.admit(request, self._next_step)
        request.row = heapq.heappop(self._free_rows)
        insort(self.running, request, key=_urgency)

    def _leave(self, request: Request) -> None:
        """Out of the running ones, holding nothing."""
        self.running.remove(request)
        heapq.heappush(self._free_rows, request.row)
        request.row = -1
        self.paging.release(request)

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        self.waiting.put_back(request)
        self.counters.num_preemptions += 1
        request.num_preemptions += 1

    def _end(self, request: Request, finish_reason: str, reason: str = "") -> None:
        del self._by_id[request.id]
        if request.row < 0:
            self.waiting.drop(request)
        else:
            self._leave(request)
        request.finish_reason, request.reason = finish_reason, reason


def _can_go_on_unseen(request: Request, share: Share) -> bool:
    """Whether what follows ``share`` can be computed before the host knows its token."""
    is_row = share.samples and len(share.tokens) == 1 == share.num_logits
    return is_row and request.is_known_by_length
