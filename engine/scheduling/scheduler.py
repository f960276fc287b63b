"""Scheduler: selects the tokens that each step computes. Runs on rank 0 only.

The scheduler has one rule: *computed tokens catch up with known tokens*. A new request lags by its whole prompt, a
decoding one by its last sampled token, a preempted one by all of its tokens. Prefill, decode, prefix hits and
recomputation are the same case, and requests can join at any step. A step has a row budget: decoding requests take one
row each, then prefill chunks share the rest.

Requests are totally ordered by *urgency*: higher priority first, then age. Waiting raises a request above later
requests of higher priority, so no request starves. Generations of one parent alternate with those of other parents
(:mod:`tapscope.engine.scheduling.waiting_queue`). The most urgent waiting request is admitted when the pages of all its
known tokens fit. When a running request needs a page and no page is free, the least urgent running request is
preempted: its pages are freed and it is queued for recomputation, possibly from the prefix cache.
"""

import heapq
import time
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from operator import attrgetter

from tapscope.core.errors import InvariantError, UsageError
from tapscope.engine.params.validators import require_invariant
from tapscope.engine.requests.drafts import Drafts
from tapscope.engine.requests.kept_rows import KeptRows
from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import NO_TOKEN, ONE_ROW, ScheduledRequest, StepPlan
from tapscope.engine.scheduling.adapter_slots import AdapterSlots
from tapscope.engine.scheduling.kv_cache_manager import KVCacheManager
from tapscope.engine.scheduling.scheduler_config import SchedulerConfig
from tapscope.engine.scheduling.state_group import StateGroup
from tapscope.engine.scheduling.step_builder import NO_DRAFTS, StepBuilder
from tapscope.engine.scheduling.waiting_queue import WaitingQueue

_require = partial(require_invariant, "scheduler")
_urgency = attrgetter("urgency")


@dataclass(slots=True)
class SchedulerStats:
    """Cumulative counters of the scheduler."""

    prefill_tokens: int = 0
    """Prompt rows computed for the first time."""
    cached_tokens: int = 0
    """Prompt rows taken from the prefix cache."""
    decode_tokens: int = 0
    """Generated tokens."""
    recomputed_tokens: int = 0
    """Rows computed again after a preemption."""
    num_preemptions: int = 0
    """Preemptions of running requests."""

    def count(self, scheduled: ScheduledRequest, num_prompt: int) -> None:
        """Add the rows of a scheduled request whose prompt has ``num_prompt`` tokens."""
        again = sum([count for count, visit in scheduled.visits if visit])
        end = scheduled.position + len(scheduled.tokens)
        self.prefill_tokens += min(len(scheduled.tokens) - again, max(0, min(end, num_prompt) - scheduled.position))
        self.recomputed_tokens += again


class Scheduler:
    """Owner of all live requests and all KV pages; plans steps and commits their sampled tokens."""

    def __init__(self, config: SchedulerConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.waiting = WaitingQueue(config.priority_aging_steps)
        """Waiting requests, including preempted ones."""
        self.running: list[Request] = []
        """Running requests, most urgent first."""
        states = None
        if config.num_state_slots:
            states = StateGroup(
                config.num_state_slots,
                config.page_size,
                config.state_interval,
                prefix_cache=config.prefix_cache,
                num_reserved=config.max_num_seqs,
            )
        self.kv_cache_manager = KVCacheManager(
            config.num_pages,
            config.page_size,
            prefix_cache=config.prefix_cache,
            window=config.window,
            windowed=config.windowed_pools,
            states=states,
        )
        self.adapter_slots = AdapterSlots(config.num_adapter_slots)
        self.stats = SchedulerStats()
        self._eos = frozenset(config.eos_token_ids)
        self._clock = clock
        self._free_rows = list(range(config.max_num_seqs))
        self._planned: list[list[tuple[Request, ScheduledRequest]]] = []
        """Scheduled requests of each planned but uncommitted step, oldest step first."""
        self._discarded: list[list[tuple[Request, ScheduledRequest]]] = []
        """Scheduled requests of steps that failed to launch since the last :meth:`plan`."""
        self._kept_rows: list[KeptRows] = []
        self._next_step = 0
        self._by_id: dict[str, Request] = {}

    @property
    def has_work(self) -> bool:
        """Whether any request is live."""
        return bool(self.waiting or self.running)

    @property
    def num_steps(self) -> int:
        """Number of steps planned so far."""
        return self._next_step

    def live(self) -> Iterator[Request]:
        """Yield the running requests, then the waiting ones, most urgent first."""
        yield from self.running
        yield from self.waiting

    def is_live(self, request_id: str) -> bool:
        """Return whether a request with this id is running or waiting."""
        return request_id in self._by_id

    def validate(self, request: Request) -> None:
        """Raise UsageError if ``request`` can never run: its id is in use, or it needs more pages than exist."""
        if self.is_live(request.id):
            raise UsageError(f"request id {request.id!r} is in use by a live request; choose another or wait for it")
        group, config = self.kv_cache_manager.too_small(request.max_positions), self.config
        if group is not None:
            of_layers = f" for layers with a window of {group.window}" if group.index else ""
            raise UsageError(
                f"request {request.id!r} needs {group.max_pages(request.max_positions)} pages of {config.page_size} "
                f"tokens{of_layers} (prompt {len(request.prompt_ids)}, {request.max_new_tokens} new) but the cache has "
                f"{group.pages.num_pages}; raise num_pages or shorten the request"
            )

    def add(self, request: Request) -> None:
        """Queue a request that passed :meth:`validate`."""
        request.submitted_s = self._clock()
        self._by_id[request.id] = request
        self.waiting.add(request, self._next_step)

    def abort(self, request_id: str, reason: str = "") -> Request | None:
        """Remove a live request in any state and return it; None if no live request has this id."""
        request = self._by_id.get(request_id)
        if request is not None:
            self._end(request, "abort", reason)
        return request

    def expire(self) -> list[Request]:
        """Abort and return the requests that exceeded a timeout. Call before each step."""
        late = []
        if self.config.has_timeouts:
            now = self._clock()
            for request in list(self.live()):
                if (reason := self.config.timeout_reason(request.submitted_s, request.started_s, now)) is not None:
                    self._end(request, "abort", reason)
                    late.append(request)
        return late

    def plan(
        self,
        *,
        all_logits: bool = False,
        epoch: int | None = None,
        drafts: Mapping[str, Drafts] | None = None,
    ) -> StepPlan:
        """Plan the next step and discard uncommitted plans. Requires :attr:`has_work`.

        ``drafts``: request id -> draft tokens that may follow the known ones. As many drafts are verified as rows and
        pages allow without delaying other requests.
        """
        failed, self._discarded = self._discarded + self._planned, []
        for request, _ in chain.from_iterable(failed):
            for table in request.tables:  # the step failed, possibly before its page tables were written
                table.num_sent_pages = 0
            if self.kv_cache_manager.states is not None and request.row >= 0:
                self._preempt(request)  # the step may have modified the recurrent state
        if failed:
            self.adapter_slots.reset()  # the step's adapters may not have been loaded
        builder = self._new_builder(all_logits=all_logits)
        num_preempted = self.stats.num_preemptions
        builder.num_reserved_rows = sum(request.is_decoding for request in self.running)
        builder.prompts = [request for request in self.running if not request.is_decoding]
        for request in sorted(self.running, key=lambda request: not request.is_decoding):
            self._schedule(request, builder, drafts.get(request.id, NO_DRAFTS) if drafts else NO_DRAFTS)
        if num_preempted == self.stats.num_preemptions:
            self._admit(builder)
        self._planned = [builder.planned]
        if not builder.planned:
            raise InvariantError(f"step {self._next_step} has nothing to compute for {len(self.running)} requests")
        self._next_step += 1
        return builder.plan(self._next_step - 1, epoch)

    def plan_ahead(self, epoch: int | None = None) -> StepPlan | None:
        """Plan the step after the last planned one while the latter is still running.

        Its tokens are not known yet (:data:`~tapscope.engine.requests.step_plan.PENDING`), only which requests sample
        one. This suffices if every running request decodes, no waiting request can join, and pages are available;
        otherwise returns None. A request that turns out to be finished still has a row in the step, whose token is
        dropped.
        """
        if self._discarded or (self.waiting and self._free_rows):
            return None
        num_live, unfinished = 0, []
        for pair in self._planned[-1]:
            request, scheduled = pair
            if request.finish_reason is None:
                num_live += 1
                is_row = scheduled.samples and len(scheduled.tokens) == 1 == scheduled.num_logits
                if not (is_row and request.can_run_ahead):
                    return None
                if len(request.tokens) - len(request.prompt_ids) + 1 < request.params.max_new_tokens:
                    unfinished.append(pair)
        if num_live != len(self.running) or not unfinished:
            return None
        if not self.kv_cache_manager.can_extend(
            [(request, scheduled.position + 1) for request, scheduled in unfinished]
        ):
            return None
        builder = self._new_builder(all_logits=False)
        builder.add_next(unfinished)
        self._planned.append(builder.planned)
        self._next_step += 1
        return builder.plan(self._next_step - 1, epoch)

    def discard_last_plan(self) -> None:
        """Discard the last planned step, which failed to launch; the next :meth:`plan` schedules its requests again."""
        self._discarded.append(self._planned.pop())

    def claim_step(self) -> int:
        """Reserve and return the next step number, for a step that is planned outside the scheduler."""
        self._next_step += 1
        return self._next_step - 1

    def _new_builder(self, *, all_logits: bool) -> StepBuilder:
        config = self.config
        self.adapter_slots.use(request.adapter_id for request in self.running)
        return StepBuilder(
            self.kv_cache_manager,
            config.max_tokens,
            config.page_size,
            all_logits=all_logits,
            adapter_slots=self.adapter_slots,
        )

    def set_drafts(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Replace the placeholder draft tokens in the oldest planned step, see :meth:`.StepPlan.with_drafts`."""
        self._planned[0] = [(request, scheduled.with_drafts(drafts)) for request, scheduled in self._planned[0]]

    def commit(self, sampled: Sequence[int]) -> list[Request]:
        """Complete the oldest planned step and return the requests that it finished.

        Appends a token to each request that caught up, plus one per accepted draft token. If drafts may be trees, call
        :meth:`take_kept_rows` next.

        ``sampled`` has one token per sampled row, in plan order. Tokens of requests aborted in the meantime are
        dropped.
        """
        tokens = iter(sampled)
        finished: list[Request] = []
        for request, scheduled in self._planned.pop(0):
            verifies = scheduled.num_drafts > 0 or bool(scheduled.tree)
            drawn = list(islice(tokens, scheduled.num_sampled)) if verifies or not scheduled.samples else [next(tokens)]
            if request.finish_reason is not None:
                continue
            if scheduled.position < len(request.prompt_ids) or scheduled.visits != ONE_ROW:
                self.stats.count(scheduled, len(request.prompt_ids))
            num_rows = len(scheduled.tokens)
            if verifies:
                self.stats.decode_tokens += self._append(request, scheduled, drawn)
                num_rows += request.num_accepted - scheduled.num_drafts
                if scheduled.tree:
                    self._keep_branch(request, scheduled)
            elif drawn and drawn[0] != NO_TOKEN:
                self.stats.decode_tokens += request.append(drawn[0], self._eos)
            request.mark_computed(scheduled.position, num_rows)
            self.kv_cache_manager.cache_full_pages(request)
            if request.finish_reason is not None:
                self._end(request, request.finish_reason, request.reason)
                finished.append(request)
        if self.config.check_invariants:
            self.check()
        return finished

    def _append(self, request: Request, scheduled: ScheduledRequest, drawn: Sequence[int]) -> int:
        """Append the first token of ``drawn`` and one more per accepted draft; return the number of tokens.

        A draft is accepted if it equals the token appended before it. Rows of rejected drafts were computed from tokens
        that are not in the request, so their samples are dropped.
        """
        before, accepted = len(request.tokens), []
        first = row = len(scheduled.tokens) - len(drawn)
        while drawn:
            known, token = len(request.tokens), drawn[row - first]
            if token != NO_TOKEN:
                request.append(token, self._eos)
            if len(request.tokens) == known or request.finish_reason is not None:
                break
            following = scheduled.next_row(row, request.tokens[-1])
            if following is None:
                break
            row = following
            accepted.append(row - first - 1)
        count = len(request.tokens) - before
        request.accepted_drafts = tuple(accepted[: max(0, count - 1)])
        return count

    def _keep_branch(self, request: Request, scheduled: ScheduledRequest) -> None:
        """Record the cache rows of the accepted branch that are not stored at their final positions yet."""
        rows = (0, *(1 + draft for draft in request.accepted_drafts))
        if rows == tuple(range(len(rows))):
            return
        slots = [
            [
                (group.slot(request, scheduled.position + row), group.slot(request, scheduled.position + depth))
                for depth, row in enumerate(rows)
                if row != depth
            ]
            for group in self.kv_cache_manager.groups
        ]
        self._kept_rows.append(KeptRows(request.id, request.row, scheduled.position, rows, slots))

    def take_kept_rows(self) -> list[KeptRows]:
        """Return and clear the rows recorded by :meth:`commit`, to be moved in the KV caches before the next step."""
        kept, self._kept_rows = self._kept_rows, []
        return kept

    def flush(self) -> int:
        """Evict all prefix cache pages that no running request holds; return the number of freed pages."""
        return self.kv_cache_manager.flush()

    def mark_nan(self, request: Request) -> None:
        """Mark a request, possibly finished, whose logits contain NaN, and drop its pages from the prefix cache."""
        request.has_nan = True
        self.kv_cache_manager.drop_prefix(request)

    def recompute(self) -> None:
        """Discard all computed tokens, including those of running requests. Called after the weights changed."""
        self.retract()
        self.flush()

    def retract(self) -> None:
        """Preempt every running request; full pages stay in the prefix cache."""
        for request in list(self.running):
            self._preempt(request)

    def check(self) -> None:
        """Check all invariants between two steps; raise InvariantError for the first violation."""
        self.kv_cache_manager.check(self.running)
        rows = sorted([*self._free_rows, *(request.row for request in self.running)])
        _require(rows == list(range(self.config.max_num_seqs)), f"rows {rows}: expected every row exactly once")
        names = sorted(request.id for request in self.live())
        _require(names == sorted(self._by_id), "live requests and known ids differ")
        for queue in (self.running, self.waiting.ready):
            _require(queue == sorted(queue, key=_urgency), "a queue is not sorted by urgency")
        for request in self.live():
            _require(request.finish_reason is None, f"{request.id!r} is finished but still live")
            _require(request.num_computed < len(request.tokens), f"{request.id!r} has nothing to compute")
        for request in self.waiting:
            _require(request.holds_nothing, f"{request.id!r} is waiting but holds pages or a row")
        _require(len(self.waiting) == sum(1 for _ in self.waiting), "the length of the waiting queue is wrong")

    def _schedule(self, request: Request, builder: StepBuilder, drafts: Drafts = NO_DRAFTS) -> None:
        """Schedule a running request within the available rows and pages; preempt less urgent requests if needed."""
        if request.row < 0 or builder.num_rows_left == 0:
            return
        self._match_prefix(request)
        if builder.is_being_computed(request):
            return
        while (num_computable_rows := self.kv_cache_manager.num_computable_rows(request)) < 1:
            victim = next(other for other in reversed(self.running) if not builder.contains(other))
            if victim is request and builder.planned and not request.is_decoding:
                return  # the less urgent requests decode in this step and are preempted in the next one
            self._preempt(victim)
            if victim is request:
                return
        builder.add(request, num_computable_rows, drafts)

    def _admit(self, builder: StepBuilder) -> None:
        """Admit waiting requests in order of urgency until one does not fit.

        A request whose adapter has no free slot is overtaken by requests without an adapter, which do not occupy a
        slot.
        """
        num_skipped, lacks_slot = 0, False
        while num_skipped < len(self.waiting.ready) and self._free_rows and builder.num_rows_left > 0:
            request = self.waiting.ready[num_skipped]
            if request.adapter_id and (lacks_slot or not self.adapter_slots.fits(request.adapter_id)):
                lacks_slot = True
                num_skipped += 1
                continue
            self._match_prefix(request)
            if builder.is_being_computed(request):
                self._undo_match(request)
                num_skipped += 1
                continue
            watermark = self.config.watermark if self.running else 0.0
            if not self.kv_cache_manager.can_admit(request, self.running, watermark):
                self._undo_match(request)
                return
            self._enter(request)
            self.adapter_slots.use(each.adapter_id for each in self.running)
            self._schedule(request, builder)

    def _match_prefix(self, request: Request) -> None:
        """Take the request's prefix from the cache.

        Hits of a preempted request are not counted: the request computed those tokens itself.
        """
        before = request.num_computed
        self.kv_cache_manager.match_prefix(request)
        if request.num_preemptions == 0:
            request.cached_tokens += request.num_computed - before
            self.stats.cached_tokens += request.num_computed - before

    def _undo_match(self, request: Request) -> None:
        """Undo :meth:`_match_prefix` for a request that was not admitted."""
        if request.num_preemptions == 0:
            self.stats.cached_tokens -= request.cached_tokens
            request.cached_tokens = 0
        self.kv_cache_manager.release(request)

    def _enter(self, request: Request) -> None:
        if request.started_s is None:
            request.started_s = self._clock()
            request.queue_time_s = request.started_s - request.submitted_s
        self.waiting.admit(request, self._next_step)
        request.row = heapq.heappop(self._free_rows)
        insort(self.running, request, key=_urgency)

    def _leave(self, request: Request) -> None:
        """Remove a request from the running list and free its row and pages."""
        self.running.remove(request)
        heapq.heappush(self._free_rows, request.row)
        request.row = -1
        self.kv_cache_manager.release(request)

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        self.waiting.requeue(request)
        self.stats.num_preemptions += 1
        request.num_preemptions += 1

    def _end(self, request: Request, finish_reason: str, reason: str = "") -> None:
        del self._by_id[request.id]
        if request.row < 0:
            self.waiting.remove(request)
        else:
            self._leave(request)
        request.finish_reason, request.reason = finish_reason, reason
