"""Speculative decoding on a CUDA device: tokens equal those of plain decoding, and chains are verified in graphs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint
from draft_heads import make_eagle3, make_llama, make_mtp, make_speculating
from moe_checkpoints import make_moe
from speculation import OracleProposer, speculate

from tapscope.engine import LLM, Generation, SamplingParams
from tapscope.engine.execution.decode_graphs import DecodeGraphs
from tapscope.engine.requests.step_plan import StepPlan
from tapscope.engine.speculative.speculator import Speculator

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 6, 7] * 4, list(range(40, 75)), [300], [*range(40, 60), 9, 8]]
TREE = {"speculative_eagle_topk": 3, "speculative_num_steps": 3, "speculative_num_draft_tokens": 10}
ALGORITHMS = ["NGRAM", "STANDALONE", "NEXTN", "EAGLE", "EAGLE3"]
GREEDY = SamplingParams(max_new_tokens=20, ignore_eos=True, full_logprobs=True)
SAMPLED = SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=0.9, seed=3)
TIES = {"float32": 1e-3, "bfloat16": 0.1}
"""Log-probability differences below which a step of another shape may select either token."""


@pytest.fixture(autouse=True)
def no_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting always pays."""
    monkeypatch.setattr(Speculator, "record_time", lambda self, plan, seconds: None)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The steps replayed by graphs."""
    found: list[StepPlan] = []
    run = DecodeGraphs.run

    def watched(self: DecodeGraphs, plan: StepPlan, *inputs: Any) -> Any:
        hidden = run(self, plan, *inputs)
        found.extend([] if hidden is None else [plan])
        return hidden

    monkeypatch.setattr(DecodeGraphs, "run", watched)
    return found


def generate(
    path: Path, known: list[list[Generation]] | None = None, **settings: Any
) -> tuple[list[list[Generation]], Any]:
    """Return greedy and sampled generations of PROMPTS, and the speculation counters.

    If ``known``, the plain engine's generations, is given, three drafts are proposed per step, of which four out of
    five are right.
    """
    if known is not None:
        settings["speculative_algorithm"] = "NGRAM"
    found = []
    with LLM(path, device="cuda", page_size=4, max_num_seqs=4, check_invariants=True, **settings) as llm:
        for number, params in enumerate((GREEDY, SAMPLED)):
            if known is not None:
                outputs = {tuple(prompt): g.token_ids for prompt, g in zip(PROMPTS, known[number], strict=True)}
                speculate(llm, OracleProposer(outputs, 0.8, 512), 3)
            found.append(llm.generate(PROMPTS, params))
        return found, llm.engine.state().get("speculation")


def tokens(found: list[list[Generation]]) -> list[list[tuple[int, ...]]]:
    return [[tuple(generation.token_ids) for generation in each] for each in found]


def check_up_to_ties(plain: list[Generation], found: list[Generation], dtype: str = "float32") -> None:
    """Check that greedy tokens are equal, or that the first differing tokens are about equally likely."""
    for one, other in zip(plain, found, strict=True):
        pairs = zip(one.token_ids, other.token_ids, one.logprobs, strict=True)
        differing = next(((a, b, item.full) for a, b, item in pairs if a != b), None)
        if differing is not None:
            a, b, logprobs = differing
            assert logprobs[a] - logprobs[b] < TIES[dtype]


def verified(replayed: list[StepPlan]) -> list[StepPlan]:
    return [plan for plan in replayed if not plan.model and any(item.num_drafts for item in plan.scheduled)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_chains_give_the_bits_of_plain_decoding(
    tmp_path: Path, replayed: list[StepPlan], algorithm: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In batch-invariant mode."""
    path, settings = make_speculating(tmp_path, algorithm)
    plain, _ = generate(path, batch_invariant=True)
    found, counts = generate(path, batch_invariant=True, **settings)
    assert tokens(found) == tokens(plain)
    for one, other in zip(plain[0], found[0], strict=True):
        assert [item.full for item in one.logprobs] == [item.full for item in other.logprobs]
    assert counts["num_draft_tokens"] > 0
    assert verified(replayed)
    assert any(plan.model for plan in replayed) == (algorithm != "NGRAM")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_chains_in_graphs_give_the_tokens_of_plain_decoding(
    tmp_path: Path, replayed: list[StepPlan], algorithm: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, settings = make_speculating(tmp_path, algorithm)
    dtype = "bfloat16" if algorithm == "NEXTN" else "float32"  # experts are captured in bfloat16 only
    plain, _ = generate(path, dtype=dtype)
    found, counts = generate(path, dtype=dtype, **settings)
    check_up_to_ties(plain[0], found[0], dtype)
    assert counts["num_draft_tokens"] > 0
    assert verified(replayed)
    assert any(len({len(item.tokens) for item in plan.scheduled}) > 1 for plan in verified(replayed))
    if algorithm != "NGRAM":
        rows = [len(item.tokens) for plan in replayed if plan.model for item in plan.scheduled]
        assert min(rows) == 1
        assert max(rows) > 1
    assert "without CUDA graphs" not in caplog.text


def test_eager_chains_give_the_tokens_of_plain_decoding(tmp_path: Path) -> None:
    path, settings = make_speculating(tmp_path, "EAGLE")
    plain, _ = generate(path, cuda_graphs="off", batch_invariant=True)
    found, _ = generate(path, cuda_graphs="off", batch_invariant=True, **settings)
    assert tokens(found) == tokens(plain)


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "NEXTN"])
def test_trees_are_verified_without_graphs(
    tmp_path: Path, replayed: list[StepPlan], algorithm: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, settings = make_speculating(tmp_path, algorithm)
    plain, _ = generate(path, batch_invariant=True)
    found, counts = generate(path, batch_invariant=True, **settings, **TREE)
    assert tokens(found) == tokens(plain)
    assert counts["num_draft_tokens"] > 0
    assert not any(item.tree for plan in replayed for item in plan.scheduled)
    assert "drafts of trees are verified without CUDA graphs" in caplog.text


@pytest.mark.parametrize("family", ["gemma3", "mamba2", "lfm2", "falcon_h1", "qwen3_next"])
def test_drafts_of_windows_and_recurrent_states(tmp_path: Path, replayed: list[StepPlan], family: str) -> None:
    """Drafts of models with a recurrent state are verified without graphs."""
    make = make_checkpoint if family in FAMILIES else make_moe
    path, dtype = make(tmp_path / "model", family, seed=3), "bfloat16" if family == "qwen3_next" else "float32"
    plain, _ = generate(path, dtype=dtype)
    found, counts = generate(path, plain, dtype=dtype)
    check_up_to_ties(plain[0], found[0], dtype)
    assert 0 < counts["num_accepted_tokens"] < counts["num_draft_tokens"]
    assert replayed
    assert bool(verified(replayed)) == (family == "gemma3")


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_drafts_of_recurrent_states_give_the_bits_of_plain_decoding(tmp_path: Path, family: str) -> None:
    make = make_checkpoint if family in FAMILIES else make_moe
    path = make(tmp_path / "model", family, seed=3)
    plain, _ = generate(path, batch_invariant=True)
    found, counts = generate(path, plain, batch_invariant=True)
    assert tokens(found) == tokens(plain)
    assert 0 < counts["num_accepted_tokens"] < counts["num_draft_tokens"]


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_mtp_of_latent_attention_and_of_hybrids(tmp_path: Path, family: str) -> None:
    path = make_mtp(tmp_path / "model", family)
    plain, _ = generate(path, dtype="bfloat16")
    found, counts = generate(path, dtype="bfloat16", speculative_algorithm="NEXTN")
    check_up_to_ties(plain[0], found[0], "bfloat16")
    assert counts["num_draft_tokens"] > 0


def test_graphs_of_heads_are_recorded_again_with_the_target(tmp_path: Path) -> None:
    """The head reads the target's embedding, whose address changes when memory is released and resumed."""
    path = make_llama(tmp_path / "model")
    settings = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": make_eagle3(tmp_path / "head", path),
    }
    with LLM(path, device="cuda", max_num_seqs=4, batch_invariant=True, **settings) as llm:
        before = llm.generate(PROMPTS, SAMPLED)
        counts = dict(llm.engine.state()["speculation"])
        llm.engine.weights.release_memory(None)
        filler = torch.full((1 << 20,), torch.nan, device="cuda")
        llm.engine.weights.resume_memory(None)
        assert [g.token_ids for g in llm.generate(PROMPTS, SAMPLED)] == [g.token_ids for g in before]
        again = llm.engine.state()["speculation"]
    assert again["num_accepted_tokens"] >= 2 * counts["num_accepted_tokens"] - 2
    del filler
