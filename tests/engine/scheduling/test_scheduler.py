"""Scheduler invariants under arbitrary traffic, and the wire format of plans."""

from typing import Any

import pytest
from fake_engine import VOCAB, FakeRank, continuation
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tapscope.core.errors import InvariantError, UsageError
from tapscope.core.wire import decode, encode
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.drafts import Drafts
from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import ScheduledRequest, StepPlan
from tapscope.engine.scheduling.page_group import BlockAllocator
from tapscope.engine.scheduling.scheduler import Scheduler
from tapscope.engine.scheduling.scheduler_config import SchedulerConfig

BASES = [[0, 1, 2, 3, 4] * 6, [3, 1, 4, 1] * 7, [2] * 28]


class Traffic(RuleBasedStateMachine):
    """Add, step, abort and fail requests at random; each request ends with the tokens it would generate alone."""

    @initialize(
        num_pages=st.integers(4, 24),
        page_size=st.sampled_from([1, 2, 3, 5]),
        max_num_seqs=st.integers(1, 5),
        max_tokens=st.sampled_from([1, 2, 5, 16, 64]),
        prefix_cache=st.booleans(),
        window=st.none() | st.integers(1, 6),
        windowed_pools=st.lists(st.tuples(st.integers(4, 24), st.integers(1, 6)), max_size=2).map(tuple),
        num_state_slots=st.just(0) | st.integers(2, 20),
        state_interval=st.integers(1, 9),
        watermark=st.sampled_from([0.0, 0.2]),
        priority_aging_steps=st.sampled_from([1, 20]),
    )
    def start(self, **settings: Any) -> None:
        self.now = 0.0
        if settings["windowed_pools"]:  # the primary group has the widest window
            settings["window"] = None
        config = SchedulerConfig(**settings, waiting_timeout_s=50, running_timeout_s=80, check_invariants=True)
        self.config = config
        self.scheduler = Scheduler(config, clock=lambda: self.now)
        windows = [window for _, window in config.windowed_pools]
        self.rank = FakeRank(config.page_size, config.window, windows)
        self.requests: dict[str, Request] = {}
        self.ended: list[str] = []
        self.computed: dict[tuple[str, int], int] = {}

    @rule(
        base=st.sampled_from(BASES),
        cut=st.integers(0, 24),
        tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
        new=st.integers(1, 12),
        priority=st.integers(-2, 2),
        rows=st.sampled_from([None, None, None, 0]),
        parent=st.sampled_from(["", "", "p", "q"]),
    )
    def submit(
        self, base: list[int], cut: int, tail: list[int], new: int, priority: int, rows: int | None, parent: str
    ) -> None:
        request = Request(
            id=str(len(self.requests)),
            prompt_ids=(*base[:cut], *tail),
            params=SamplingParams(max_new_tokens=new, prompt_logprobs=rows),
            priority=priority,
            parent=parent,
        )
        group = self.scheduler.kv_cache_manager.too_small(request.max_positions)
        if group is not None:
            with pytest.raises(UsageError, match=f"the cache has {group.pages.num_pages}"):
                self.scheduler.validate(request)
            return
        self.scheduler.validate(request)
        self.scheduler.add(request)
        self.requests[request.id] = request

    @precondition(lambda self: self.scheduler.has_work)
    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.scheduler.has_work:
                self._step(commit=True)

    @precondition(lambda self: self.scheduler.has_work)
    @rule()
    def a_step_that_fails(self) -> None:
        self._step(commit=False)

    @precondition(lambda self: self.scheduler.has_work)
    @rule(data=st.data(), during=st.booleans())
    def abort(self, data: st.DataObject, during: bool) -> None:
        name = data.draw(st.sampled_from([request.id for request in self.scheduler.live()]))
        if during:
            self._step(commit=True, aborting=name)
            return
        assert self.scheduler.abort(name, "client gone") is self.requests[name]
        self.ended.append(name)
        assert self.scheduler.abort(name) is None

    @rule(seconds=st.sampled_from([1.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for request in self.scheduler.expire():
            assert request.finish_reason == "abort"
            assert "timed out after" in request.reason
            self.ended.append(request.id)

    @rule(deep=st.booleans())
    def flush(self, deep: bool) -> None:
        self.scheduler.recompute() if deep else self.scheduler.flush()
        assert self.scheduler.kv_cache_manager.num_cached == 0

    @invariant()
    def scheduler_is_consistent(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5000):
            if not self.scheduler.has_work:
                break
            self._step(commit=True)
        assert not self.scheduler.has_work, "requests starve"
        self.scheduler.check()
        assert self.scheduler.kv_cache_manager.num_used == 0
        self.scheduler.flush()
        for group in self.scheduler.kv_cache_manager.groups:
            assert group.pages.num_free == group.pages.num_pages
        assert self.scheduler.kv_cache_manager.num_free_states == self.config.num_state_slots
        assert sorted(self.ended) == sorted(self.requests), "a request ended twice or never"
        for name, request in self.requests.items():
            alone = continuation(request.prompt_ids, request.max_new_tokens)
            assert list(request.generated) == alone[: len(request.generated)]
            assert request.finish_reason == "abort" or len(request.generated) == request.max_new_tokens
            assert 0 <= request.cached_tokens < len(request.prompt_ids)
            if request.wants_prompt_rows and request.finish_reason == "length":
                assert all(self.computed[name, position] for position in range(len(request.prompt_ids)))

    def _step(self, *, commit: bool, aborting: str | None = None) -> None:
        plan = self.scheduler.plan()
        assert 0 < plan.num_tokens <= self.config.max_tokens
        assert len({scheduled.row for scheduled in plan.scheduled}) == len(plan.scheduled) <= self.config.max_num_seqs
        for scheduled in plan.scheduled:
            past = [
                self.computed.get((scheduled.request, scheduled.position + i), 0) for i in range(len(scheduled.tokens))
            ]
            assert past == [visit for count, visit in scheduled.visits for _ in range(count)]
            at_end = scheduled.position + len(scheduled.tokens) == len(self.requests[scheduled.request].tokens)
            assert scheduled.samples == at_end
            request = self.requests[scheduled.request]
            in_prompt = request.wants_prompt_rows and scheduled.position < len(request.prompt_ids)
            wanted = len(scheduled.tokens) if in_prompt else int(at_end)
            assert scheduled.num_logits == wanted
        sampled = self.rank.execute(plan, self.requests)
        if not commit:
            return
        if aborting is not None:
            self.scheduler.abort(aborting)
            self.ended.append(aborting)
        self.ended += [request.id for request in self.scheduler.commit(sampled)]
        for scheduled in plan.scheduled:
            if scheduled.request != aborting:
                for i in range(len(scheduled.tokens)):
                    place = (scheduled.request, scheduled.position + i)
                    self.computed[place] = self.computed.get(place, 0) + 1


Traffic.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestTraffic = Traffic.TestCase


def _scheduler(**given: Any) -> Scheduler:
    defaults = {"num_pages": 12, "page_size": 4, "max_num_seqs": 4, "max_tokens": 16, "check_invariants": True}
    return Scheduler(SchedulerConfig(**defaults | given))


def _add(
    scheduler: Scheduler,
    name: str,
    num_prompt: int,
    new: int = 4,
    priority: int = 0,
    first: int = 0,
    parent: str = "",
    salt: str = "",
) -> Request:
    prompt = (first, *(2 + i % 3 for i in range(num_prompt - 1)))
    request = Request(
        id=name,
        prompt_ids=prompt,
        params=SamplingParams(max_new_tokens=new, ignore_eos=True),
        priority=priority,
        parent=parent,
        cache_salt=salt,
    )
    scheduler.validate(request)
    scheduler.add(request)
    return request


def _step(scheduler: Scheduler) -> dict[str, tuple[int, int]]:
    """Plan and commit one step; return the position and row count of each scheduled request."""
    plan = scheduler.plan()
    scheduler.commit([1] * len(plan.sampled_logits))
    return {scheduled.request: (scheduled.position, len(scheduled.tokens)) for scheduled in plan.scheduled}


def test_scheduler_plans_decodes_before_prefill_chunks() -> None:
    scheduler = _scheduler(num_pages=40, max_tokens=8)
    _add(scheduler, "a", 3)
    assert _step(scheduler) == {"a": (0, 3)}
    _add(scheduler, "long", 30, first=1)
    assert list(_step(scheduler).items()) == [("a", (3, 1)), ("long", (0, 7))]
    assert list(_step(scheduler).items()) == [("a", (4, 1)), ("long", (7, 7))]


def test_scheduler_reuses_cached_prefixes() -> None:
    scheduler = _scheduler()
    _add(scheduler, "a", 8, new=1)
    assert _step(scheduler) == {"a": (0, 8)}
    again = _add(scheduler, "b", 8, new=1)
    assert _step(scheduler) == {"b": (4, 4)}  # two pages match, but the second holds the last token
    longer = _add(scheduler, "c", 11, new=1)
    assert _step(scheduler) == {"c": (8, 3)}
    assert (again.cached_tokens, longer.cached_tokens, scheduler.stats.cached_tokens) == (4, 8, 12)
    assert scheduler.stats.prefill_tokens == 8 + 4 + 3


def test_scheduler_separates_prefixes_by_salt() -> None:
    scheduler = _scheduler()
    found = {}
    for name, salt in (("a", "x"), ("b", "x"), ("c", "y"), ("d", ""), ("e", ""), ("f", "y")):
        request = _add(scheduler, name, 10, new=1, salt=salt)
        _step(scheduler)
        found[name] = request.cached_tokens
    assert found == {"a": 0, "b": 8, "c": 0, "d": 0, "e": 8, "f": 8}
    for name in ("g", "h"):
        _add(scheduler, name, 10, new=1, first=1, salt=name)
    assert _step(scheduler) == {"g": (0, 10), "h": (0, 6)}, "neither waits for the other's pages"


def test_scheduler_finds_requests_by_id_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = _scheduler(check_invariants=False)
    monkeypatch.setattr(Scheduler, "live", lambda _: pytest.fail("all live requests were walked"))
    first = _add(scheduler, "a", 3)
    with pytest.raises(UsageError, match="'a' is in use"):
        _add(scheduler, "a", 3)
    _step(scheduler)
    assert scheduler.abort("a") is first
    assert scheduler.abort("a") is None
    assert not scheduler.is_live("a")
    _add(scheduler, "a", 3, new=1)
    _step(scheduler)
    assert not scheduler.is_live("a")


def test_scheduler_computes_equal_prompts_once() -> None:
    scheduler = _scheduler(max_tokens=64)
    for name in "abc":
        _add(scheduler, name, 10)
    assert _step(scheduler) == {"a": (0, 10)}
    assert _step(scheduler) == {"a": (10, 1), "b": (8, 2), "c": (8, 2)}


def test_scheduler_priority_and_aging() -> None:
    scheduler = _scheduler(max_num_seqs=1, priority_aging_steps=5)
    low = _add(scheduler, "low", 2, new=1, priority=0)
    served = []
    for i in range(40):
        _add(scheduler, f"high-{i}", 2, new=1, priority=2)
        served += _step(scheduler)
        if low.finish_reason:
            break
    assert served == [*(f"high-{i}" for i in range(10)), "low"]  # aging over ten steps outweighs two priority levels


def test_waiting_queue_alternates_parents() -> None:
    scheduler = _scheduler(max_num_seqs=1)
    for parent, count in (("a", 4), ("b", 2)):
        for index in range(count):
            _add(scheduler, f"{parent}{index}", 2, new=1, parent=parent)
    served = [*_step(scheduler), *_step(scheduler)]
    _add(scheduler, "alone", 2, new=1)
    while scheduler.has_work:
        served += _step(scheduler)
    assert served == ["a0", "b0", "a1", "b1", "alone", "a2", "a3"]


def test_waiting_queue_passes_an_aborted_turn_to_the_next_sibling() -> None:
    scheduler = _scheduler(max_num_seqs=1)
    for name, parent in (("a0", "a"), ("a1", "a"), ("a2", "a"), ("b", "")):
        _add(scheduler, name, 2, new=1, parent=parent)
    assert scheduler.abort("a1") is not None  # not the head of the queue
    assert scheduler.abort("a0") is not None
    assert [*_step(scheduler), *_step(scheduler)] == ["a2", "b"]
    assert len(scheduler.waiting) == 0


@st.composite
def _arrivals(draw: st.DrawFn) -> list[tuple[int, str, int, int]]:
    """Draw (arrival step, parent, tokens to generate, priority) tuples in order of arrival."""
    one = st.tuples(st.integers(0, 12), st.sampled_from("abc"), st.integers(1, 5), st.integers(0, 1))
    return sorted(draw(st.lists(one, min_size=1, max_size=24)), key=lambda arrival: arrival[0])


def _serve(arrivals: list[tuple[int, str, int, int]], *, with_parents: bool, max_num_seqs: int) -> dict[str, list[int]]:
    """Return [step of the first token, tokens generated] of each request, in order of admission."""
    scheduler = _scheduler(
        num_pages=64, max_num_seqs=max_num_seqs, max_tokens=64, prefix_cache=False, priority_aging_steps=10
    )
    pending, served, step = list(enumerate(arrivals)), {}, 0
    while pending or scheduler.has_work:
        while pending and pending[0][1][0] <= step:
            index, (_, parent, new, priority) = pending.pop(0)
            _add(scheduler, f"{index}", 3, new=new, priority=priority, parent=parent if with_parents else "")
        if scheduler.has_work:
            for name in _step(scheduler):
                served.setdefault(name, [step, 0])[1] += 1
        step += 1
        assert step < 1000, "requests starve"
    return served


@given(arrivals=_arrivals(), max_num_seqs=st.integers(1, 3))
def test_waiting_queue_keeps_order_within_parents(arrivals: list[tuple[int, str, int, int]], max_num_seqs: int) -> None:
    fair = _serve(arrivals, with_parents=True, max_num_seqs=max_num_seqs)
    plain = _serve(arrivals, with_parents=False, max_num_seqs=max_num_seqs)
    assert {name: tokens for name, (_, tokens) in fair.items()} == {name: tokens for name, (_, tokens) in plain.items()}
    assert sum(tokens for _, tokens in fair.values()) == sum(new for _, _, new, _ in arrivals)
    for line in {(parent, priority) for _, parent, _, priority in arrivals}:
        names = [str(i) for i, (_, parent, _, priority) in enumerate(arrivals) if (parent, priority) == line]
        assert [name for name in fair if name in names] == names


@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=5), before=st.integers(0, 12), new=st.integers(1, 4))
def test_waiting_queue_delays_a_request_by_one_round(counts: list[int], before: int, new: int) -> None:
    scheduler = _scheduler(max_num_seqs=1)
    for parent, count in enumerate(counts):
        for index in range(count):
            _add(scheduler, f"{parent}.{index}", 2, new=new, parent=f"p{parent}")
    for _ in range(before):
        if scheduler.has_work:
            _step(scheduler)
    running = {request.id for request in scheduler.running}
    alone = _add(scheduler, "alone", 2, new=1)
    admitted: dict[str, None] = {}
    while not alone.finish_reason:
        admitted |= dict.fromkeys(_step(scheduler))
    parents = [name.split(".")[0] for name in admitted if name != "alone" and name not in running]
    assert len(parents) == len(set(parents)), "a parent was served twice while a new request waited"


@pytest.mark.parametrize(("num_pages", "resumed_at", "visits"), [(5, 2, ((2, 1), (1, 0))), (7, 6, ((1, 0),))])
def test_scheduler_preempts_the_least_urgent_and_resumes_from_cache(
    num_pages: int, resumed_at: int, visits: tuple[tuple[int, int], ...]
) -> None:
    scheduler = _scheduler(num_pages=num_pages, page_size=2, max_tokens=64)
    first, second = _add(scheduler, "a", 4, new=5), _add(scheduler, "b", 4, new=6, first=1)
    scheduled = []
    while scheduler.has_work:
        plan = scheduler.plan()
        scheduled += plan.scheduled
        scheduler.commit([1] * len(plan.sampled_logits))
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert [scheduled.position for scheduled in scheduled if scheduled.request == "a"] == [0, 4, 5, 6, 7]
    end = scheduled.index(
        next(scheduled for scheduled in scheduled if scheduled.request == "a" and scheduled.position == 7)
    )
    assert {scheduled.request for scheduled in scheduled[end:]} == {"a", "b"}
    resumed = scheduled[end + 1]  # "b" was admitted only after "a" ended: no page was taken from it twice
    assert (resumed.request, resumed.position, resumed.visits) == ("b", resumed_at, visits)
    assert scheduler.stats.recomputed_tokens == sum(count for count, visit in visits if visit)
    assert second.finish_reason == "length"


def test_scheduler_does_not_preempt_prefill_for_less_urgent_decodes() -> None:
    scheduler = _scheduler(num_pages=9, page_size=1, max_tokens=3, prefix_cache=False)
    low = _add(scheduler, "low", 2, new=8)
    _step(scheduler)
    high = _add(scheduler, "high", 6, new=1, priority=1)
    trace = []
    while not high.finish_reason:
        trace.append(_step(scheduler))
    assert trace == [
        {"low": (2, 1), "high": (0, 2)},
        {"low": (3, 1), "high": (2, 2)},
        {"low": (4, 1)},
        {"high": (4, 2)},
    ]
    assert (high.num_preemptions, low.num_preemptions) == (0, 1)


@pytest.mark.parametrize(("num_pages", "num_drafts"), [(16, 0), (18, 2), (24, 5)])
def test_scheduler_drafts_leave_the_pages_of_a_chunked_prompt(num_pages: int, num_drafts: int) -> None:
    scheduler = _scheduler(num_pages=num_pages, page_size=1, max_tokens=8, prefix_cache=False)
    _add(scheduler, "a", 2, new=12)
    _step(scheduler)
    prompt = _add(scheduler, "long", 12, new=1)
    assert _step(scheduler) == {"a": (2, 1), "long": (0, 7)}
    plan = scheduler.plan(drafts={"a": Drafts((7,) * 5)})
    assert {item.request: item.num_drafts for item in plan.scheduled}["a"] == num_drafts
    scheduler.commit([1] * len(plan.sampled_logits))
    while not prompt.finish_reason:
        _step(scheduler)
    assert prompt.num_preemptions == 0


def test_scheduler_recomputes_without_prefix_cache() -> None:
    scheduler = _scheduler(num_pages=7, page_size=2, max_tokens=64, prefix_cache=False)
    _add(scheduler, "a", 4, new=5)
    _add(scheduler, "b", 4, new=6, first=1)
    runs = []
    while scheduler.has_work:
        plan = scheduler.plan()
        runs += [(run.request, run.position, run.count, run.visit) for run in plan.info().rows if run.visit]
        scheduler.commit([1] * len(plan.sampled_logits))
    assert runs == [("b", 0, 6, 1)]


def test_scheduler_runs_prompts_longer_than_the_cache_with_windows() -> None:
    scheduler = _scheduler(num_pages=4, page_size=4, window=5, max_tokens=16)
    request = _add(scheduler, "a", 50, new=30)
    while scheduler.has_work:
        _step(scheduler)
        assert scheduler.kv_cache_manager.num_used <= 4
    assert request.finish_reason == "length"
    with pytest.raises(UsageError, match=r"needs 4 pages .* but the cache has 3"):
        _add(_scheduler(num_pages=3, window=5), "a", 50)


def test_scheduler_timeouts_abort_with_a_reason() -> None:
    now = [0.0]
    config = SchedulerConfig(
        num_pages=12, page_size=4, max_num_seqs=1, waiting_timeout_s=5, running_timeout_s=8, check_invariants=True
    )
    scheduler = Scheduler(config, clock=lambda: now[0])
    running, waiting = _add(scheduler, "a", 4), _add(scheduler, "b", 4)
    _step(scheduler)
    now[0] = 6.0
    assert scheduler.expire() == [waiting]
    assert waiting.reason == "timed out after waiting for 6 s; waiting_timeout_s is 5"
    now[0] = 9.0
    assert scheduler.expire() == [running]
    assert (running.finish_reason, running.reason) == (
        "abort",
        "timed out after running for 9 s; running_timeout_s is 8",
    )
    assert not scheduler.has_work
    assert scheduler.kv_cache_manager.num_used == 0


@pytest.mark.parametrize("damage", ["leak", "twice", "row", "refs", "count", "alive"])
def test_scheduler_check_detects_violations(damage: str) -> None:
    scheduler = _scheduler()
    request = _add(scheduler, "a", 10)
    _step(scheduler)
    kv_cache_manager = scheduler.kv_cache_manager
    if damage == "leak":
        kv_cache_manager.pages.allocate_pages(1)
    elif damage == "twice":
        kv_cache_manager.pages.free_pages([request.table(0).pages[0]])
    elif damage == "row":
        scheduler._free_rows.append(request.row)
    elif damage == "refs":
        request.table(0).prefix_node.refs += 1
    elif damage == "count":
        kv_cache_manager.tree.num_evictable += 1
    else:
        request.finish_reason = "stop"
    with pytest.raises(InvariantError):
        scheduler.check()


@st.composite
def _shares(draw: st.DrawFn) -> ScheduledRequest:
    tokens = tuple(draw(st.lists(st.integers(0, 2**31), min_size=1, max_size=6)))
    samples, cut = draw(st.booleans()), draw(st.integers(1, len(tokens)))
    runs = ((cut, draw(st.integers(0, 5))), (len(tokens) - cut, 0))
    return ScheduledRequest(
        request=draw(st.text(min_size=1, max_size=8)),
        row=draw(st.integers(0, 100)),
        position=draw(st.integers(0, 2**40)),
        visits=tuple(run for run in runs if run[0]),
        tokens=tokens,
        page_start=draw(st.integers(0, 100)),
        windowed_pages=tuple(map(tuple, draw(st.lists(st.lists(st.integers(0, 99), min_size=1), max_size=2)))),
        pages=tuple(draw(st.lists(st.integers(0, 2**31), max_size=6))),
        num_logits=draw(st.integers(int(samples), len(tokens))),
        samples=samples,
    )


plans = st.builds(
    StepPlan,
    step=st.integers(0, 2**40),
    phase=st.sampled_from(["prefill", "decode", "mixed"]),
    scheduled=st.lists(_shares(), min_size=1, max_size=5).map(tuple),
    kv_pages_used=st.integers(0, 100),
    epoch=st.none() | st.integers(0, 10),
)


@given(plan=plans)
def test_step_plan_message_roundtrip(plan: StepPlan) -> None:
    assert StepPlan.from_message(decode(encode(plan.to_message()))) == plan


@given(plan=plans)
def test_step_plan_rows_and_logit_rows(plan: StepPlan) -> None:
    info = plan.info()
    slots = [slot for run in info.rows for slot in range(run.slot, run.slot + run.count)]
    assert slots == list(range(plan.num_tokens))
    assert info.grid == (plan.num_tokens,)
    assert len(info.token_ids) == info.num_rows == plan.num_tokens
    starts = dict.fromkeys(plan.slots)
    ends = [slot + len(scheduled.tokens) for slot, scheduled in zip(starts, plan.scheduled, strict=True)]
    wanted = [
        row
        for end, scheduled in zip(ends, plan.scheduled, strict=True)
        for row in range(end - scheduled.num_logits, end)
    ]
    assert list(info.row_sets["logits"]) == wanted
    sampled = [end - 1 for end, scheduled in zip(ends, plan.scheduled, strict=True) if scheduled.samples]
    assert [wanted[index] for index in plan.sampled_logits] == sampled


@given(counts=st.lists(st.integers(1, 5), max_size=8))
def test_block_allocator_returns_distinct_pages(counts: list[int]) -> None:
    allocator = BlockAllocator(sum(counts))
    held = [allocator.allocate_pages(count) for count in counts]
    assert sorted(page for pages in held for page in pages) == list(range(sum(counts)))
    for pages in held:
        allocator.free_pages(pages)
    assert allocator.num_free == sum(counts)
    assert allocator.num_used == 0
