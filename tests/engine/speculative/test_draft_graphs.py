"""Steps with drafts in CUDA graphs, which a CPU imitates: what a graph reads and writes is in static memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from draft_heads import make_speculating
from moe_checkpoints import make_moe
from torch import Tensor

from tapscope.engine import LLM, SamplingParams
from tapscope.engine.execution import cuda_graphs
from tapscope.engine.execution.cuda_graphs import CapturedGraph, DecodeGraphs
from tapscope.engine.execution.model_runner import ModelRunner
from tapscope.engine.layers import paged_attention
from tapscope.engine.requests.step_plan import StepPlan
from tapscope.kernels.cpu.paged import paged_reference

PROMPTS = [[5, 6, 7] * 4, list(range(40, 75)), [300], [*range(40, 60), 9, 8]]
TREE = {"speculative_eagle_topk": 3, "speculative_num_steps": 3, "speculative_num_draft_tokens": 10}
PARAMS = [SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=t, seed=3) for t in (0.0, 0.9)]


class Imitation:
    """A graph whose replay computes everything again and writes it where the first computation did."""

    def __init__(self, compute: Callable[[], list[Tensor]]) -> None:
        self._compute, self.values = compute, [value.clone() for value in compute()]

    def replay(self) -> None:
        for value, again in zip(self.values, self._compute(), strict=True):
            value.copy_(again)


def imitated(self: DecodeGraphs, size: int, observer: Any = None) -> CapturedGraph:
    def compute() -> list[Tensor]:
        hidden = self._decode(self._inputs(size), None)
        return [hidden, *(each for value in held_values() for each in listed(value))]

    def held_values() -> list[Any]:
        return [getattr(module, name) for module, name in self._holders]

    def listed(value: Any) -> list[Tensor]:
        return value if isinstance(value, list) else [] if value is None else [value]

    self._load_padding(size)
    graph: Any = Imitation(compute)
    hidden, *others = graph.values
    held = []
    for (module, name), value in zip(self._holders, held_values(), strict=True):
        own, others = others[: len(listed(value))], others[len(listed(value)) :]
        held.append((module, name, own if isinstance(value, list) else own[0] if own else None))
    return CapturedGraph(graph, self._inputs(size), hidden, tuple(held))


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The steps that graphs compute, in engines made from now on."""
    found: list[StepPlan] = []
    run = DecodeGraphs.run

    def counted(self: DecodeGraphs, plan: StepPlan, extra: Any = None) -> Tensor | None:
        hidden = run(self, plan, extra)
        found.extend([] if hidden is None else [plan])
        return hidden

    wants = lambda self, config: config.cuda_graphs != "off"  # noqa: E731
    monkeypatch.setattr(ModelRunner, "_can_capture_graphs", wants)
    monkeypatch.setattr(paged_attention, "paged_attention", paged_reference)  # reads lengths from the buffers
    monkeypatch.setattr(DecodeGraphs, "_record", imitated)
    monkeypatch.setattr(DecodeGraphs, "run", counted)
    monkeypatch.setattr(cuda_graphs.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 31))
    return found


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
