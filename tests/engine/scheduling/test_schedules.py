"""Generated tokens equal transformers' however a request is scheduled: chunked, preempted, or resumed mid-prompt."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from engine_helpers import ThreadRanks, reference_tokens
from engine_observers import Memory
from hypothesis import given, settings
from hypothesis import strategies as st

from tapscope.cli import main
from tapscope.dumper import make_observer
from tapscope.dumper.config import DumperConfig
from tapscope.engine import LLM, SamplingParams
from tapscope.engine.requests.step_plan import StepPlan
from tapscope.sources import open_run

SHARED = list(range(40, 75))
PROMPTS = [[5, 6, 7], SHARED, [300], [*SHARED[:20], 9, 8], [*SHARED, 11, 12, 13], [9, 8, 7, 6, 5, 4, 3, 2, 11, 12]]
NUM_NEW = 32


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama") / "model", "llama", seed=1)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    return [reference_tokens(path, prompt, NUM_NEW) for prompt in PROMPTS]


@pytest.fixture(scope="module", params=["each step alone", "steps ahead"])
def llm(path: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(path, page_size=4, num_pages=30, max_num_batched_tokens=9, check_invariants=True) as made:
        # On a CPU no step runs concurrently, but steps are planned ahead as on a GPU.
        made.engine.async_scheduling = request.param == "steps ahead"
        yield made


def _run(llm: LLM, prompts: Sequence[Sequence[int]], count: int = NUM_NEW) -> list[list[int]]:
    return [list(g.token_ids) for g in llm.generate(prompts, max_new_tokens=count, ignore_eos=True)]


@pytest.mark.parametrize(
    "given",
    [
        {"page_size": 1, "max_num_batched_tokens": 512, "num_pages": 150},
        {"page_size": 3, "max_num_batched_tokens": 7, "num_pages": 36},
        {"page_size": 16, "max_num_batched_tokens": 33, "num_pages": 7},
        {"page_size": 3, "max_num_batched_tokens": 1, "num_pages": 130},
        {"page_size": 3, "max_num_batched_tokens": 64, "num_pages": 40, "prefix_cache": False},
    ],
    ids=str,
)
def test_schedules_of_any_page_and_chunk_size_equal_transformers(
    path: Path, expected: list[list[int]], given: dict[str, Any]
) -> None:
    with LLM(path, observer=Memory, check_invariants=True, **given) as llm:
        assert _run(llm, PROMPTS) == expected
        stats = llm.engine.scheduler.stats
        assert _run(llm, PROMPTS[:2:-1], 8) == [tokens[:8] for tokens in expected[:2:-1]]
        assert llm.engine.scheduler.kv_cache_manager.num_used == 0
        assert (stats.num_preemptions > 0) == (given["num_pages"] * given["page_size"] < 200)
        assert (stats.cached_tokens > 0) == given.get("prefix_cache", True)
        visits: dict[tuple[str, int], int] = {}
        for info in llm.observer.steps:
            for run in info.rows:
                for position in range(run.position, run.position + run.count):
                    assert visits.get((run.request, position), 0) == run.visit
                    visits[run.request, position] = run.visit + 1
        assert (max(visits.values()) > 1) == (stats.recomputed_tokens > 0)


def test_abort_at_any_step_does_not_change_other_requests(llm: LLM, path: Path, expected: list[list[int]]) -> None:
    prompts, num_new = [PROMPTS[1], PROMPTS[3], PROMPTS[5]], 8
    wanted = [expected[1][:num_new], expected[3][:num_new], expected[5][:num_new]]
    for boundary in range(20):
        names = [llm.submit(prompt, max_new_tokens=num_new, ignore_eos=True) for prompt in prompts]
        victim = names[boundary % 3]
        done = {}
        for step in range(200):
            if step == boundary:
                dropped = llm.abort(victim)
                if dropped is not None:
                    done[victim] = dropped
                assert llm.abort(victim) is None
                llm.engine.scheduler.check()
            if not llm.has_work:
                break
            done |= {generation.request: generation for generation in llm.step()}
        for name, tokens in zip(names, wanted, strict=True):
            got = list(done[name].token_ids)
            assert got == tokens[: len(got)]
            assert len(got) == num_new or name == victim
        assert llm.engine.scheduler.kv_cache_manager.num_used == 0


@settings(max_examples=12)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, len(PROMPTS) - 1), st.integers(1, 20), st.integers(-1, 1)),
        min_size=1,
        max_size=10,
    )
)
def test_schedules_of_any_priority_and_arrival_give_the_same_tokens(
    llm: LLM, expected: list[list[int]], arrivals: list[tuple[int, int, int, int]]
) -> None:
    done: dict[str, Any] = {}
    asked: dict[str, tuple[int, int]] = {}
    for wait, which, count, priority in arrivals:
        name = llm.submit(PROMPTS[which], max_new_tokens=count, ignore_eos=True, priority=priority)
        asked[name] = (which, count)
        for _ in range(wait):
            done |= {generation.request: generation for generation in llm.step()}
    while llm.has_work:
        done |= {generation.request: generation for generation in llm.step()}
    for name, (which, count) in asked.items():
        assert list(done[name].token_ids) == expected[which][:count]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_schedules_with_windows_and_few_pages(tmp_path: Path, family: str, is_async: bool) -> None:
    path = make_checkpoint(tmp_path / "model", family, seed=2)
    prompts = [PROMPTS[1], PROMPTS[3], PROMPTS[5]]
    # If every layer has a window (11 positions), one request never holds 6 pages of 4.
    num_pages = 6 if family == "mistral" else 26
    with LLM(path, page_size=4, num_pages=num_pages, max_num_batched_tokens=10, check_invariants=True) as llm:
        llm.engine.async_scheduling = is_async
        tokens = _run(llm, prompts)
        assert llm.engine.scheduler.kv_cache_manager.num_used == 0
    assert tokens == [reference_tokens(path, prompt, NUM_NEW) for prompt in prompts]


@pytest.mark.parametrize("given", [{}, {"batch_invariant": True}], ids=str)
def test_schedules_share_prefixes_longer_than_the_window(tmp_path: Path, given: dict[str, Any]) -> None:
    path = make_checkpoint(tmp_path / "model", "mistral", seed=2)
    with LLM(path, page_size=4, num_pages=40, max_num_batched_tokens=10, check_invariants=True, **given) as llm:
        generations = [
            llm.generate([prompt], max_new_tokens=20, ignore_eos=True)[0] for prompt in (SHARED, SHARED, PROMPTS[4])
        ]
        assert [generation.cached_tokens for generation in generations] == [0, 32, 32]
        assert llm.engine.scheduler.kv_cache_manager.num_used == 0
    for prompt, generation in zip((SHARED, SHARED, PROMPTS[4]), generations, strict=True):
        assert list(generation.token_ids) == reference_tokens(path, prompt, 20)


def test_schedules_update_page_tables_on_all_ranks(path: Path, tmp_path: Path, expected: list[list[int]]) -> None:
    ranks = ThreadRanks(
        path, tmp_path / "store", 2, page_size=3, num_pages=40, max_num_batched_tokens=16, prefix_cache=True
    )
    requests = ranks.generate(PROMPTS, NUM_NEW)
    assert [list(request.generated) for request in requests] == expected
    stats = ranks.scheduler.stats
    assert stats.num_preemptions > 0
    assert stats.cached_tokens > 0
    ranks.close()


def test_plan_ahead_drops_extra_rows(path: Path, expected: list[list[int]]) -> None:
    """Of three prompts, one ends early by a stop token and one by its length."""
    plans: list[StepPlan] = []
    stop = expected[2][3]
    with LLM(path, page_size=4, check_invariants=True) as llm:
        llm.engine.async_scheduling = True
        launch = llm.engine.runner.launch
        llm.engine.runner.launch = lambda plan, sample=None: plans.append(plan) or launch(plan, sample)
        params = [
            SamplingParams(max_new_tokens=20, ignore_eos=True),
            SamplingParams(max_new_tokens=20, ignore_eos=True, stop_token_ids=(stop,)),
            SamplingParams(max_new_tokens=6, ignore_eos=True),
        ]
        found = [list(g.token_ids) for g in llm.generate([PROMPTS[0], PROMPTS[2], PROMPTS[5]], params)]
        assert llm.engine.scheduler.kv_cache_manager.num_used == 0
    assert found == [expected[0][:20], expected[2][: expected[2].index(stop) + 1], expected[5][:6]]
    assert [plan.has_pending for plan in plans] == [False, False, *[True] * 18]
    rows = [len(plan.scheduled) for plan in plans]
    assert rows == [3, 3, 3, 3, 3, 2, *[1] * 14]  # the stop is known one step late


def test_a_decoding_step_makes_few_python_calls_for_each_request(path: Path) -> None:
    def calls(llm: LLM, num_requests: int) -> int:
        for index in range(num_requests):
            llm.submit([5, 6, 7 + index], max_new_tokens=16, ignore_eos=True)
        for _ in range(3):
            llm.step()
        made: Counter[str] = Counter()
        sys.setprofile(lambda _frame, event, _value: made.update([event]))
        try:
            llm.step()
        finally:
            sys.setprofile(None)
        while llm.has_work:
            llm.step()
        return made["call"]

    with LLM(path, max_num_seqs=24, num_pages=48) as llm:
        llm.engine.async_scheduling = True
        few, many = calls(llm, 8), calls(llm, 24)
    assert (many - few) / 16 < 90  # about 75; on GPUs, host time bounds large batches of small models


def test_abort_of_the_last_request_drains_steps(path: Path) -> None:
    with LLM(path, observer=Memory, check_invariants=True) as llm:
        llm.engine.async_scheduling = True
        llm.observer.armed = False
        name = llm.submit(PROMPTS[0], max_new_tokens=20, ignore_eos=True)
        for _ in range(4):
            llm.step()
        assert llm.engine.num_in_flight == 1
        assert llm.abort(name) is not None
        assert llm.engine.num_in_flight == 0
        assert not llm.has_work
        assert len(llm.observer.metrics) == len(llm.observer.steps)
        assert _run(llm, PROMPTS[:1], 4)


def test_timeout_of_the_last_request_drains_steps(path: Path) -> None:
    with LLM(path, check_invariants=True, running_timeout_s=60.0) as llm:
        llm.engine.async_scheduling = True
        clock = [0.0]
        llm.engine.scheduler._clock = lambda: clock[0]
        llm.submit(PROMPTS[0], max_new_tokens=20, ignore_eos=True)
        for _ in range(4):
            llm.step()
        assert llm.engine.num_in_flight == 1
        clock[0] = 100.0
        (generation,) = llm.step()
        assert generation.finish_reason == "abort"
        assert llm.engine.num_in_flight == 0


def test_steps_launched_ahead_record_what_steps_alone_record(path: Path, tmp_path: Path) -> None:
    """Includes requests that end early, whose row in the step launched ahead is discarded."""
    with LLM(path) as llm:
        third = [g.token_ids[3] for g in llm.generate(PROMPTS, max_new_tokens=4, ignore_eos=True)]
    params = [SamplingParams(max_new_tokens=8, ignore_eos=True, stop_token_ids=(token,)) for token in third]
    params[2] = SamplingParams(max_new_tokens=8, ignore_eos=True)
    answers, ahead = [], 0
    for is_async in (False, True):
        observer = partial(make_observer, out=str(tmp_path / str(is_async)), config=DumperConfig(keep="full"))
        with LLM(path, observer=observer) as llm:
            llm.engine.async_scheduling = is_async
            answers.append([g.token_ids for g in llm.generate(PROMPTS, params)])
    assert answers[0] == answers[1]
    alone, run = open_run(tmp_path / "False"), open_run(tmp_path / "True")
    assert run.ledger().complete
    for number in sorted(alone.steps):
        info, other = run.steps[number][0].info, alone.steps[number][0].info
        assert (info.token_ids, [r.request for r in info.rows]) == (other.token_ids, [r.request for r in other.rows])
        ahead += info.grid != other.grid
    assert ahead, "no step was launched ahead of a request's end"
    assert main(["diff", str(tmp_path / "False"), str(tmp_path / "True")]) == 0


def test_plan_ahead_does_not_change_seeded_sampling(path: Path) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=0.9, top_p=0.9, seed=5, ignore_eos=True)
    answers = []
    for is_async in (False, True):
        with LLM(path, check_invariants=True) as llm:
            llm.engine.async_scheduling = is_async
            answers.append([g.token_ids for g in llm.generate(PROMPTS, params)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "given", [{"logprobs": 2}, {"min_new_tokens": 3}, {"repetition_penalty": 1.3}, {"hidden_states": True}], ids=str
)
def test_plan_ahead_excludes_requests_that_need_the_last_token(path: Path, given: dict[str, Any]) -> None:
    params = SamplingParams(max_new_tokens=6, ignore_eos=True, **given)
    assert params.needs_last_token
    with LLM(path, check_invariants=True) as llm:
        llm.engine.async_scheduling = True
        ahead = llm.engine.scheduler.plan_ahead
        seen: list[Any] = []
        llm.engine.scheduler.plan_ahead = lambda epoch: seen.append(ahead(epoch))
        llm.generate(PROMPTS, params)
    assert seen
    assert not any(seen)
