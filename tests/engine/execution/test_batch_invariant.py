"""Batch-invariant mode: a request's logits are the same bits whoever else runs and however its prompt is cut."""

from pathlib import Path

import pytest
import torch
from batch_invariant_runs import NEW, PROMPTS, bits
from batch_invariant_runs import path as path
from checkpoints import make_checkpoint, make_llama
from engine_helpers import reference_logits
from moe_checkpoints import make_moe

from tapscope.engine import LLM, SamplingParams


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


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe", "deepseek_v3"])
def test_batch_invariant_supports_windows_softcaps_experts_and_mla(tmp_path: Path, family: str) -> None:
    windowed = {"sliding_window": 9} if family == "gemma2" else {}
    make = make_checkpoint if family == "gemma2" else make_moe
    path = make(tmp_path / "model", family, seed=1, **windowed)
    alone = bits(path, [[1], [4], [7]])
    for results in (bits(path, [[7, 1, 4]]), bits(path, [[1, 4, 7]], max_num_batched_tokens=7, page_size=4)):
        for i, (tokens, logprobs) in results.items():
            assert tokens == alone[i][0]
            assert torch.equal(logprobs, alone[i][1])


def test_default_mode_is_not_batch_invariant(tmp_path: Path) -> None:
    """The tests above could not fail otherwise."""
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
