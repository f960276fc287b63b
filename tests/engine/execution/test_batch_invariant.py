"""Batch-invariant mode: a request's logits are bit-identical for any batch and any chunking of its prompt."""

from pathlib import Path

import checkpoints
import moe_checkpoints
import pytest
import torch
from batch_invariant_runs import NEW, PROMPTS, bits
from batch_invariant_runs import path as path
from checkpoints import make_checkpoint, make_llama
from engine_helpers import reference_logits
from moe_checkpoints import make_moe
from soak_cases import mostly_soak
from triton_helpers import use_exact_products

from tapscope.engine import LLM, SamplingParams
from tapscope.engine.execution import batch_invariant
from tapscope.engine.layers import fused
from tapscope.kernels import triton


def test_batch_invariant_is_bit_identical_in_batches_chunks_and_prefix_hits(path: Path) -> None:
    alone = bits(path, [[i] for i in range(8)])
    others = {
        "one batch": bits(path, [list(range(8))]),
        "batches": bits(path, [[7, 0], [3, 6, 1], [5, 2, 4]]),
        "chunks": bits(path, [list(range(8))], max_num_batched_tokens=7, page_size=4),
        "all logits": bits(path, [[6, 7]], logits="all"),
        "prefix hits": bits(path, [[7], [7, 6]], history=PROMPTS[7][:40], page_size=4),
    }
    for name, results in others.items():
        for i, (tokens, logprobs) in results.items():
            assert tokens == alone[i][0], f"{name}: other tokens of prompt {i}"
            assert torch.equal(logprobs, alone[i][1]), f"{name}: other bits of prompt {i}"


@pytest.mark.parametrize(
    "family", ["gemma2", pytest.param("gemma3n", marks=pytest.mark.soak), "qwen3_moe", "deepseek_v3"]
)
def test_batch_invariant_supports_windows_softcaps_experts_and_mla(tmp_path: Path, family: str) -> None:
    windowed = {"sliding_window": 9} if family == "gemma2" else {}
    make = make_checkpoint if family.startswith("gemma") else make_moe
    path = make(tmp_path / "model", family, seed=1, **windowed)
    alone = bits(path, [[1], [4], [7]])
    for results in (bits(path, [[7, 1, 4]]), bits(path, [[1, 4, 7]], max_num_batched_tokens=7, page_size=4)):
        for i, (tokens, logprobs) in results.items():
            assert tokens == alone[i][0]
            assert torch.equal(logprobs, alone[i][1])


_FAMILIES = sorted({*checkpoints.FAMILIES, *moe_checkpoints.FAMILIES} - {"qwen3_moe"})
_CASES = [("qwen3_moe", "bfloat16"), *((family, dtype) for family in _FAMILIES for dtype in ("float32", "bfloat16"))]


@pytest.mark.parametrize(
    ("family", "dtype"), [_CASES[0], *(pytest.param(*case, marks=pytest.mark.soak) for case in _CASES[1:])]
)
def test_log_probabilities_of_decoding_are_those_of_a_whole_prefill(tmp_path: Path, family: str, dtype: str) -> None:
    make = make_moe if family in moe_checkpoints.FAMILIES else make_checkpoint
    path = make(tmp_path / "model", family, seed=1, dtype=dtype)
    sampled = SamplingParams(max_new_tokens=12, logprobs=0, ignore_eos=True, temperature=1.0, seed=3)
    with LLM(path, batch_invariant=True) as llm:
        prompts = [[5, *range(20, 50)], [7, 9, 11]]
        for prompt, generation in zip(prompts, llm.generate(prompts, sampled), strict=True):
            tokens = [*prompt, *generation.token_ids]
            scored = llm.generate([tokens], SamplingParams(max_new_tokens=0, prompt_logprobs=0))[0]
            expected = [each.logprob for each in scored.prompt_logprobs[len(prompt) :]]
            assert [each.logprob for each in generation.logprobs] == expected


@pytest.mark.parametrize("family", mostly_soak(["llama", "gemma2"], default=["gemma2"]))
def test_batch_invariant_kernels_equal_the_functions_of_a_cpu(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels in Triton's interpreter; a row's bits depend neither on the batch nor on prompt chunks."""
    if triton.why_not(torch.device("cpu")) is not None:
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1 and a CPU")
    use_exact_products(monkeypatch)
    shape = {"sliding_window": 9, "num_hidden_layers": 2} if family == "gemma2" else {"num_hidden_layers": 1}
    path = make_checkpoint(tmp_path / "model", family, seed=1, **shape)
    expected = bits(path, [[0], [1]], num_new=2)
    monkeypatch.setattr(fused, "may_run_on", lambda device: True)
    monkeypatch.setattr(batch_invariant, "may_run_on", lambda device: True)
    alone = bits(path, [[0], [1]], num_new=2)
    together = bits(path, [[1, 0]], num_new=2, max_num_batched_tokens=7, page_size=4)
    for i, (tokens, logprobs) in alone.items():
        assert tokens == expected[i][0] == together[i][0]
        torch.testing.assert_close(logprobs, expected[i][1], atol=1e-4, rtol=0)
        assert torch.equal(logprobs, together[i][1])


def test_default_mode_is_not_batch_invariant(tmp_path: Path) -> None:
    """Shows that the tests above can fail."""
    path = make_llama(tmp_path / "model", seed=1)
    params = SamplingParams(max_new_tokens=NEW, full_logprobs=True, ignore_eos=True)
    with LLM(path) as llm:
        together = llm.generate(PROMPTS, params)
        alone = [llm.generate([prompt], params)[0] for prompt in PROMPTS]
    assert any(a.logprobs != b.logprobs for a, b in zip(together, alone, strict=True))


def test_batch_invariant_logits_equal_transformers(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model", seed=1)
    for i, (tokens, logprobs) in bits(path, [[0, 7]]).items():
        expected = reference_logits(path, [*PROMPTS[i], *tokens]).log_softmax(-1)[len(PROMPTS[i]) - 1 : -1]
        torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)
