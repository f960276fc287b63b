"""The engine matches transformers for every shape of Llama, on one rank and on several."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LLAMA3_ROPE, make_llama
from engine_helpers import ThreadRanks, check_parity, reference_tokens
from gpu_helpers import ON_GPU

from tapscope.engine import LLM

PROMPTS = [[5, 6, 7], list(range(40, 75)), [300], [9, 8, 7, 6, 5, 4, 3, 2, 11, 12, 13, 14, 15, 16, 17, 18, 19]]
NUM_NEW = 12

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one-head-per-group": {"num_key_value_heads": 4},
    "wide-groups": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16},
    "narrow-heads": {"head_dim": 8, "tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "odd-vocab": {"vocab_size": 523, "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    "odd-vocab-untied": {"vocab_size": 521, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("tp", "device"), [(1, "cpu"), (2, "cpu"), pytest.param(1, "cuda", marks=ON_GPU)])
def test_llama_fp32_logits_and_greedy_tokens_equal_transformers(
    tmp_path: Path, shape: str, tp: int, device: str
) -> None:
    check_parity(make_llama(tmp_path / "model", seed=3, **SHAPES[shape]), tp, PROMPTS, NUM_NEW, device=device)


def test_tensor_parallel_with_an_uneven_vocabulary(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model", seed=4, vocab_size=3, num_key_value_heads=4, bos_token_id=0, eos_token_id=1)
    ranks = ThreadRanks(path, tmp_path / "store", 4)
    # With a vocabulary of 3 tokens, the fourth rank holds no row.
    (request,) = ranks.generate([[1, 2, 2, 0]], 12)
    assert ranks.runners[3].model.lm_head.weight.shape[0] == 0
    assert list(request.generated) == reference_tokens(path, [1, 2, 2, 0], 12)
    ranks.close()


def test_load_weights_reads_sharded_checkpoints(tmp_path: Path) -> None:
    one = make_llama(tmp_path / "one", seed=6)
    many = make_llama(tmp_path / "many", seed=6, max_shard_size="100KB")
    assert (many / "model.safetensors.index.json").exists()
    results = []
    for path in (one, many):
        with LLM(path) as llm:
            results.append(llm.generate(PROMPTS, max_new_tokens=8, ignore_eos=True))
    assert results[0] == results[1]


def test_llm_dtype_casts_a_float32_checkpoint(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model")
    with LLM(path, dtype="bfloat16") as llm:
        assert {parameter.dtype for parameter in llm.model.parameters()} == {torch.bfloat16}
        assert llm.generate([PROMPTS[0]], max_new_tokens=2)[0].token_ids
