"""Latent attention computes what transformers computes, expanded or absorbed, and caches one latent a position."""

from pathlib import Path
from typing import Any

import pytest
from engine_helpers import ThreadRanks, reference_logits, reference_tokens
from moe_checkpoints import YARN, make_moe

from tapscope.engine.models.deepseek import DeepseekAttention

PROMPTS = [[5, 6, 7], list(range(40, 75)), [300], [9, 8, 7, 6, 5, 4, 3, 2, 11, 12, 13, 14, 15, 16, 17, 18, 19]]

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("deepseek_v2", {}),
    "v2-lite": ("deepseek_v2", {"q_lora_rank": None, "attention_bias": True}),
    "v2-yarn": ("deepseek_v2", {"rope_parameters": YARN, "max_position_embeddings": 256}),
    "v3-yarn": ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "v3-halves": ("deepseek_v3", {"rope_interleave": False, "attention_bias": True, "rms_norm_eps": 1e-3}),
    "v3-direct-query": ("deepseek_v3", {"q_lora_rank": None, "v_head_dim": 16, "qk_nope_head_dim": 4}),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("absorb", [True, False])
def test_logits_and_tokens_equal_transformers_in_chunks_and_mixed_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, absorb: bool
) -> None:
    monkeypatch.setattr(DeepseekAttention, "absorb", absorb)
    family, config = SHAPES[shape]
    path = make_moe(tmp_path / "model", family, seed=7, **config)
    ranks = ThreadRanks(path, tmp_path / "store", 2, page_size=4, max_tokens_per_step=12)
    for request in ranks.generate(PROMPTS, 24):
        assert list(request.generated) == reference_tokens(path, request.prompt_ids, 24)
        expected = reference_logits(path, request.tokens[:-1])
        assert (ranks.runners[1].observer.logits_of(request.id) - expected).abs().max() <= 1e-4
    ranks.close()
