"""The scheduler's invariants hold for any traffic, and a plan survives the wire."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tapscope.engine.pages import PageAllocator
from tapscope.engine.plan import Share, StepPlan
from tapscope.engine.request import Request
from tapscope.engine.sampling_params import SamplingParams
from tapscope.engine.scheduler import Scheduler
from tapscope.errors import UsageError
from tapscope.wire import decode, encode

EOS = 1
PAGE_SIZE = 4
NUM_PAGES = 12

arrivals = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 30), st.integers(1, 12), st.booleans()), min_size=1, max_size=12
)


def _check_pages(scheduler: Scheduler) -> None:
    owned = [page for request in scheduler.running for page in request.pages]
    assert len(owned) == len(set(owned)), "a page has two owners"
    assert len(owned) + scheduler.pages.num_free == NUM_PAGES, "a page leaked"
    assert all(not request.pages for request in scheduler.waiting)


@settings(max_examples=150, deadline=None)
@given(arrivals=arrivals, aborts=st.sets(st.integers(0, 11)), sampled=st.integers(0, 5), max_running=st.integers(1, 5))
def test_every_position_is_computed_once_in_order_and_no_page_leaks(
    arrivals: list[tuple[int, int, int, bool]], aborts: set[int], sampled: int, max_running: int
) -> None:
    scheduler = Scheduler(NUM_PAGES, PAGE_SIZE, max_running, [EOS])
    pending = list(enumerate(arrivals))
    computed: dict[str, int] = {}
    finished: list[Request] = []
    entered: list[str] = []
    step = 0
    while pending or scheduler.has_work:
        while pending and pending[0][1][0] <= step:
            index, (_, prompt, new, ignore) = pending.pop(0)
            request = Request(
                id=str(index), prompt_ids=(2,) * prompt, params=SamplingParams(max_new_tokens=new, ignore_eos=ignore)
            )
            try:
                scheduler.check(request)
            except UsageError:
                assert -(-(prompt + new - 1) // PAGE_SIZE) > NUM_PAGES
                continue
            scheduler.add(request)
        if step in aborts:
            scheduler.abort(str(step))
            _check_pages(scheduler)
        if scheduler.has_work:
            plan = scheduler.plan(all_logits=False, epoch=None)
            assert 0 < len(plan.shares) <= max_running
            for share in plan.shares:
                assert share.position == computed.get(share.request, 0)
                assert len(share.tokens) >= 1
                computed[share.request] = share.position + len(share.tokens)
                assert computed[share.request] <= len(share.pages) * PAGE_SIZE
                if share.position == 0:
                    entered.append(share.request)
            finished += scheduler.commit([sampled] * len(plan.sampled_logits))
            _check_pages(scheduler)
        step += 1
        assert step < 500, "requests starve"
    assert scheduler.pages.num_free == NUM_PAGES
    assert entered == sorted(entered, key=int), "a later request overtook an earlier one"
    for request in finished:
        assert computed[request.id] == len(request.tokens) - 1
        stopped = sampled == EOS and not request.params.ignore_eos
        assert request.finish_reason == ("stop" if stopped else "length")
        assert len(request.generated) == (1 if stopped else request.max_new_tokens)


@st.composite
def _shares(draw: st.DrawFn) -> Share:
    tokens = tuple(draw(st.lists(st.integers(0, 2**31), min_size=1, max_size=6)))
    samples = draw(st.booleans())
    return Share(
        request=draw(st.text(min_size=1, max_size=8)),
        row=draw(st.integers(0, 100)),
        position=draw(st.integers(0, 2**40)),
        visit=draw(st.integers(0, 5)),
        tokens=tokens,
        page_start=draw(st.integers(0, 100)),
        pages=tuple(draw(st.lists(st.integers(0, 2**31), max_size=6))),
        num_logits=draw(st.integers(int(samples), len(tokens))),
        samples=samples,
    )


plans = st.builds(
    StepPlan,
    step=st.integers(0, 2**40),
    phase=st.sampled_from(["prefill", "decode", "mixed"]),
    shares=st.lists(_shares(), min_size=1, max_size=5).map(tuple),
    kv_pages_used=st.integers(0, 100),
    epoch=st.none() | st.integers(0, 10),
)


@given(plan=plans)
def test_a_plan_survives_the_wire(plan: StepPlan) -> None:
    assert StepPlan.from_message(decode(encode(plan.to_message()))) == plan


@given(plan=plans)
def test_a_plans_rows_tile_the_grid_and_logit_rows_end_each_share(plan: StepPlan) -> None:
    info = plan.info()
    slots = [slot for run in info.rows for slot in range(run.slot, run.slot + run.count)]
    assert slots == list(range(plan.num_tokens))
    assert info.grid == (plan.num_tokens,)
    assert len(info.token_ids) == info.num_rows == plan.num_tokens
    ends = [run.slot + run.count for run in info.rows]
    wanted = [row for end, share in zip(ends, plan.shares, strict=True) for row in range(end - share.num_logits, end)]
    assert list(info.row_sets["logits"]) == wanted
    sampled = [end - 1 for end, share in zip(ends, plan.shares, strict=True) if share.samples]
    assert [wanted[index] for index in plan.sampled_logits] == sampled


@given(counts=st.lists(st.integers(1, 5), max_size=8))
def test_pages_taken_are_distinct_and_come_back(counts: list[int]) -> None:
    allocator = PageAllocator(sum(counts))
    held = [allocator.take(count) for count in counts]
    assert sorted(page for pages in held for page in pages) == list(range(sum(counts)))
    for pages in held:
        allocator.give_back(pages)
    assert allocator.num_free == sum(counts)
    assert allocator.num_used == 0
