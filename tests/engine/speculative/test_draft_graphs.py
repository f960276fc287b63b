"""CUDA graphs of steps with drafts, imitated on a CPU: a graph reads and writes static memory only."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from draft_heads import make_speculating
from graph_imitation import imitate_prefill_graphs
from moe_checkpoints import make_moe
from soak_cases import mostly_soak

from tapscope.engine import LLM, SamplingParams
from tapscope.engine.execution.draft_runner import DraftRunner
from tapscope.engine.requests.step_plan import StepPlan
from tapscope.engine.speculative import speculator
from tapscope.engine.speculative.draft_cost import DraftCosts

PROMPTS = [[5, 6, 7] * 4, list(range(40, 75)), [300], [*range(40, 60), 9, 8]]
TREE = {"speculative_eagle_topk": 3, "speculative_num_steps": 3, "speculative_num_draft_tokens": 10}
PARAMS = [SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=t, seed=3) for t in (0.0, 0.9)]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The steps replayed by graphs, in engines created afterwards."""
    return imitate_prefill_graphs(monkeypatch)


def tokens_of(path: Path, **settings: Any) -> list[list[tuple[int, ...]]]:
    with LLM(path, page_size=4, max_num_seqs=4, check_invariants=True, **settings) as llm:
        found = [[g.token_ids for g in llm.generate(PROMPTS, params)] for params in PARAMS]
        if settings.get("speculative_algorithm"):
            assert llm.engine.speculator.stats.num_accepted_tokens > 0
    return found


@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE", "NEXTN", "EAGLE", "EAGLE3"])
def test_graphs_with_drafts_keep_the_tokens(tmp_path: Path, replays: list[StepPlan], algorithm: str) -> None:
    path, settings = make_speculating(tmp_path, algorithm)
    assert tokens_of(path, **settings) == tokens_of(path, cuda_graphs="off")
    verified = [plan for plan in replays if not plan.model and any(item.num_drafts for item in plan.scheduled)]
    drafted = [plan for plan in replays if plan.model == "draft"]
    assert verified
    assert any(len(plan.scheduled) > 1 for plan in verified)
    assert any(len({len(item.tokens) for item in plan.scheduled}) > 1 for plan in verified)
    if algorithm != "NGRAM":
        counts = {len(item.tokens) for plan in drafted for item in plan.scheduled}
        assert 1 in counts
        assert max(counts) > 1


def drafted(path: Path, *, is_async: bool = False, **settings: Any) -> tuple[list[Any], dict[Any, Any], list[int]]:
    """Return the greedy tokens, the drafts verified after each position of each request, and the chains started."""
    found, started = dict[Any, Any](), list[int]()
    with LLM(path, page_size=4, max_num_seqs=8, check_invariants=True, **settings) as llm:
        llm.engine.async_scheduling = is_async
        scheduler, chains = llm.engine.scheduler, llm.engine.draft_runner.chains
        commit = scheduler.commit

        def noted(sampled: Any) -> Any:
            found.update({(item.request, item.position): item.drafts for _, item in scheduler._planned[0]})
            return commit(sampled)

        scheduler.commit = noted
        if chains is not None:
            start = chains.launch
            chains.launch = lambda *args: (started.append(len(args[1])), start(*args))[1]
        params = SamplingParams(max_new_tokens=24, ignore_eos=True)
        tokens = [generation.token_ids for generation in llm.generate(PROMPTS * 2, params)]
        assert llm.engine.scheduler.kv_cache_manager.num_used == 0
    return tokens, found, started


@pytest.mark.parametrize(
    ("algorithm", "is_async"),
    mostly_soak(
        product(["EAGLE", "EAGLE3", "NEXTN"], [False, True]),
        default=[("EAGLE3", True)],
    ),
)
def test_chains_on_the_device_draft_what_the_host_drafts(
    tmp_path: Path, replays: list[StepPlan], algorithm: str, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Includes requests with unequal numbers of drafts, and a padded number of requests."""
    monkeypatch.setattr(speculator, "_FIRST_PAUSE", 0)
    path, settings = make_speculating(tmp_path, algorithm)
    tokens, chained, started = drafted(path, is_async=is_async, **settings)
    monkeypatch.setattr(DraftRunner, "make_chains", lambda self, *args: None)
    expected, by_host, none = drafted(path, **settings)
    assert tokens == expected
    assert none == []
    assert len(started) > 5
    assert max(started) > 4
    common = {each for each in chained.keys() & by_host.keys() if chained[each] and by_host[each]}
    assert len(common) > 100
    for each in common:
        depth = min(len(chained[each]), len(by_host[each]))
        assert chained[each][:depth] == by_host[each][:depth]
        assert min(chained[each]) >= 0


def test_chains_on_the_device_give_each_request_all_drafts(tmp_path: Path, replays: list[StepPlan]) -> None:
    """Even after rejections: a step of the head takes as long for one request as for all."""
    path, settings = make_speculating(tmp_path, "EAGLE")
    with LLM(path, page_size=4, max_num_seqs=4, **settings) as llm:
        speculator = llm.engine.speculator
        speculator.record_time = lambda plan, seconds: None
        llm.generate(PROMPTS, SamplingParams(max_new_tokens=30, ignore_eos=True))
        num_drafts, stats = settings.get("speculative_num_draft_tokens", 4) - 1, speculator.stats
    full = [
        item.num_drafts == num_drafts
        for plan in replays
        if plan.phase == "verify" and not plan.model
        for item in plan.scheduled
    ]
    assert stats.num_accepted_tokens < stats.num_draft_tokens
    assert sum(full) >= len(full) - len(PROMPTS) * num_drafts, "all but those of the last tokens"


def test_a_head_that_does_not_draft_catches_up_while_steps_are_in_flight(
    tmp_path: Path, replays: list[StepPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head catches up for all requests together, so that steps without drafts always launch ahead."""
    path, settings = make_speculating(tmp_path, "EAGLE")
    monkeypatch.setattr(DraftCosts, "drafting_pays", lambda self, running, acceptance: False)
    params, in_flight, computed = SamplingParams(max_new_tokens=150, ignore_eos=True), [], []
    tokens = []
    for more in (settings, {}):
        with LLM(path, page_size=4, max_num_seqs=4, check_invariants=True, **more) as llm:
            llm.engine.async_scheduling = True
            if more:
                proposer = llm.engine.speculator.proposer
                compute = proposer._compute_rows

                def noted(rows: Any, llm: LLM = llm, compute: Any = compute) -> None:
                    in_flight.append(llm.engine.num_in_flight)
                    computed.append(len(rows))
                    compute(rows)

                proposer._compute_rows = noted
            tokens.append([generation.token_ids for generation in llm.generate(PROMPTS, params)])
    assert tokens[0] == tokens[1]
    assert in_flight == [1, 1]
    assert computed == [len(PROMPTS)] * 2


@pytest.mark.parametrize("head", mostly_soak(["EAGLE", "EAGLE3"], default=["EAGLE"]))
def test_draft_trees_are_computed_without_graphs(tmp_path: Path, replays: list[StepPlan], head: str) -> None:
    path, settings = make_speculating(tmp_path, head)
    assert tokens_of(path, **settings, **TREE) == tokens_of(path, cuda_graphs="off")
    assert replays
    assert not any(item.tree for plan in replays for item in plan.scheduled)


@pytest.mark.parametrize("family", ["gemma3", "lfm2"])
def test_graphs_with_drafts_of_windows_and_recurrent_states(
    tmp_path: Path, replays: list[StepPlan], family: str
) -> None:
    """Drafts of models with a recurrent state are verified without graphs."""
    path = make_checkpoint(tmp_path / "model", family, seed=3)
    assert tokens_of(path, speculative_algorithm="NGRAM") == tokens_of(path, cuda_graphs="off")
    assert replays
    assert any(item.num_drafts for plan in replays for item in plan.scheduled) == (family == "gemma3")


def test_experts_of_verified_rows_come_from_the_graph(tmp_path: Path, replays: list[StepPlan]) -> None:
    path = make_moe(tmp_path / "model", "mixtral", seed=1)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True, routed_experts=True)
    found = []
    for more in ({"speculative_algorithm": "NGRAM"}, {"cuda_graphs": "off"}):
        with LLM(path, page_size=4, max_num_seqs=4, check_invariants=True, **more) as llm:
            found.append([(g.token_ids, g.routed_experts) for g in llm.generate(PROMPTS, params)])
    assert any(item.num_drafts for plan in replays for item in plan.scheduled)
    for (tokens, experts), (others, expected) in zip(*found, strict=True):
        assert tokens == others
        assert (experts.array() == expected.array()).all()
