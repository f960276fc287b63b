"""CUDA graphs of steps with prompts give the tokens of eager steps, and the same bits where shapes are equal."""

from pathlib import Path
from typing import Any

import pytest
import torch
from batch_invariant_runs import PROMPTS as ODD_LENGTHS
from batch_invariant_runs import bits
from checkpoints import FAMILIES, make_checkpoint, make_llama
from lora_adapters import ATTENTION, make_adapter
from moe_checkpoints import make_moe

from tapscope.engine import LLM, SamplingParams
from tapscope.engine.execution.prefill_graphs import PrefillGraphs
from tapscope.engine.requests.step_plan import StepPlan

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 6, 7] * 4, list(range(40, 75)), [300], [*range(40, 60), 9, 8], list(range(100, 109))]


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The steps with prompts that graphs replay."""
    found: list[StepPlan] = []
    run = PrefillGraphs.run

    def watched(self: PrefillGraphs, plan: StepPlan, extra: Any = None) -> Any:
        hidden = run(self, plan, extra)
        found.extend([] if hidden is None else [plan])
        return hidden

    monkeypatch.setattr(PrefillGraphs, "run", watched)
    return found


def make(path: Path, family: str) -> Path:
    return make_checkpoint(path, family, seed=1) if family in FAMILIES else make_moe(path, family, seed=1)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "mistral", "olmo2"])
def test_prefill_graphs_give_the_tokens_of_eager_steps(tmp_path: Path, replayed: list[StepPlan], family: str) -> None:
    """In float32, with full and chunked prompts, and requests that join, end, are preempted and hit prefixes."""
    path = make(tmp_path / "model", family)
    prompts = [[token + shift for token in prompt] for shift in (0, 20, 0, 40) for prompt in PROMPTS]
    asked = [SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=t, seed=5) for t in (0.0, 0.8)]
    answers = []
    for graphs in ("off", "all"):
        settings = {"cuda_graphs": graphs, "page_size": 4, "num_pages": 40, "max_num_batched_tokens": 30}
        with LLM(path, device="cuda", max_num_seqs=5, check_invariants=True, **settings) as llm:
            answers.append([g.token_ids for params in asked for g in llm.generate(prompts, params)])
            assert llm.engine.scheduler.stats.num_preemptions or family == "mistral"  # it frees pages behind its window
    assert answers[0] == answers[1]
    counts = [[len(item.tokens) for item in plan.scheduled] for plan in replayed]
    assert any(1 in each and max(each) > 1 for each in counts)
    assert any(sum(count > 1 for count in each) > 1 for each in counts)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "qwen3_moe"])
def test_prefill_graphs_have_the_bits_of_an_eager_step_of_their_size(
    tmp_path: Path, replayed: list[StepPlan], family: str
) -> None:
    path = make(tmp_path / "model", family)
    prompts = [list(range(20, 36)), list(range(30, 62)), [7 + i % 90 for i in range(128)]]
    asked = SamplingParams(max_new_tokens=1, full_logprobs=True)
    answers = []
    for graphs in ("off", "all"):
        with LLM(path, device="cuda", dtype="bfloat16", cuda_graphs=graphs) as llm:
            answers.append([llm.generate([prompt], asked)[0].logprobs[0].full for prompt in prompts])
    assert [plan.num_tokens for plan in replayed] == [16, 32, 128]
    for one, other in zip(*answers, strict=True):
        assert torch.equal(torch.tensor(one), torch.tensor(other))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prefill_graphs_are_batch_invariant(tmp_path: Path, replayed: list[StepPlan], dtype: str) -> None:
    path = make_llama(tmp_path / "model", seed=1, dtype=dtype)
    numbers = range(len(ODD_LENGTHS))
    alone = bits(path, [[i] for i in numbers], device="cuda", cuda_graphs="off")
    others = {
        "one batch": bits(path, [list(numbers)], device="cuda", cuda_graphs="all"),
        "batches": bits(path, [[7, 0], [3, 6, 1], [5, 2, 4]], device="cuda", cuda_graphs="all"),
        "chunks": bits(path, [list(numbers)], max_num_batched_tokens=17, page_size=4, device="cuda", cuda_graphs="all"),
    }
    assert replayed
    for name, results in others.items():
        for i, (tokens, logprobs) in results.items():
            assert tokens == alone[i][0], f"{name}: other tokens of prompt {i}"
            assert torch.equal(logprobs, alone[i][1]), f"{name}: other bits of prompt {i}"


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_prefill_graphs_with_drafts_and_an_fp8_cache(
    tmp_path: Path, replayed: list[StepPlan], kv_cache_dtype: str
) -> None:
    """Drafts are verified in the same steps as prompts."""
    path = make_llama(tmp_path / "model", seed=1, num_hidden_layers=2)
    asked = SamplingParams(max_new_tokens=24, ignore_eos=True)
    settings = {"speculative_algorithm": "NGRAM", "speculative_ngram_min_match_window_size": 1}
    answers = []
    for more in ({"cuda_graphs": "off"}, {"cuda_graphs": "all", **settings}):
        more |= {"kv_cache_dtype": kv_cache_dtype, "batch_invariant": True}
        with LLM(path, device="cuda", max_num_seqs=4, page_size=4, check_invariants=True, **more) as llm:
            answers.append([g.token_ids for g in llm.generate(PROMPTS * 2, asked)])
    assert answers[0] == answers[1]
    assert replayed


def test_prefill_graphs_after_released_memory_and_adapters(tmp_path: Path, replayed: list[StepPlan]) -> None:
    """Graphs are captured again after their addresses change; steps with adapters run eagerly."""
    path = make_llama(tmp_path / "model", seed=1, num_hidden_layers=2)
    adapters = {"a": make_adapter(tmp_path / "a", path, ATTENTION, seed=1)}
    asked = SamplingParams(max_new_tokens=4, ignore_eos=True)
    with LLM(path, device="cuda", cuda_graphs="off", lora_paths=adapters, prefix_cache=False) as llm:
        plain = [g.token_ids for g in llm.generate(PROMPTS, asked)]
        adapted = [g.token_ids for g in llm.generate(PROMPTS, asked, adapter=["a"] * len(PROMPTS))]
    with LLM(path, device="cuda", cuda_graphs="all", lora_paths=adapters, prefix_cache=False) as llm:

        def tokens(**more: Any) -> list[Any]:
            return [g.token_ids for g in llm.generate(PROMPTS, asked, **more)]

        assert tokens() == plain
        count = len(replayed)
        assert count
        assert tokens(adapter=["a"] * len(PROMPTS)) == adapted
        assert len(replayed) == count
        llm.engine.weights.release_memory(None)
        llm.engine.weights.resume_memory(None)
        assert tokens() == plain
        assert len(replayed) == 2 * count
