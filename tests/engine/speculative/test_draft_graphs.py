"""Steps with drafts in CUDA graphs, which a CPU imitates: what a graph reads and writes is in static memory."""

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from draft_heads import make_speculating
from graph_imitation import imitate_graphs
from moe_checkpoints import make_moe

from tapscope.engine import LLM, SamplingParams
from tapscope.engine.requests.step_plan import StepPlan

PROMPTS = [[5, 6, 7] * 4, list(range(40, 75)), [300], [*range(40, 60), 9, 8]]
TREE = {"speculative_eagle_topk": 3, "speculative_num_steps": 3, "speculative_num_draft_tokens": 10}
PARAMS = [SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=t, seed=3) for t in (0.0, 0.9)]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The steps that graphs compute, in engines made from now on."""
    return imitate_graphs(monkeypatch)


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


@pytest.mark.parametrize("head", ["EAGLE", "EAGLE3"])
def test_draft_trees_are_computed_without_graphs(tmp_path: Path, replays: list[StepPlan], head: str) -> None:
    path, settings = make_speculating(tmp_path, head)
    assert tokens_of(path, **settings, **TREE) == tokens_of(path, cuda_graphs="off")
    assert replays
    assert not any(item.tree for plan in replays for item in plan.scheduled)


@pytest.mark.parametrize("family", ["gemma3", "lfm2"])
def test_graphs_with_drafts_of_windows_and_recurrent_states(
    tmp_path: Path, replays: list[StepPlan], family: str
) -> None:
    """Drafts with a recurrent state are verified without graphs."""
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
