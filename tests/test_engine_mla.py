"""Latent attention computes what transformers computes, expanded or absorbed, and caches one latent a position."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import ThreadRanks, reference_logits
from engine_observers import Memory
from moe_checkpoints import LATENT, YARN, make_moe
from safetensors.torch import load_file, save_file

from tapscope.engine import LLM
from tapscope.engine.cache import CacheLayout
from tapscope.engine.models.deepseek import DeepseekAttention
from tapscope.errors import CheckpointError, UsageError

PROMPTS = [[5, 6, 7], list(range(40, 75)), [300], [9, 8, 7, 6, 5, 4, 3, 2, 11, 12, 13, 14, 15, 16, 17, 18, 19]]

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-yarn": ("deepseek_v2", {"rope_parameters": YARN}),
    "v2-lite": ("deepseek_v2", {"q_lora_rank": None, "attention_bias": True}),
    "v3-yarn": ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "v3-halves": ("deepseek_v3", {"rope_interleave": False, "attention_bias": True, "rms_norm_eps": 1e-3}),
    "v3-direct-query": ("deepseek_v3", {"q_lora_rank": None, "v_head_dim": 16, "qk_nope_head_dim": 4}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_tokens_equal_transformers_in_chunks_and_mixed_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    family, config = SHAPES[shape]
    path = make_moe(tmp_path / "model", family, seed=7, **config)
    for absorb in (True, False):
        monkeypatch.setattr(DeepseekAttention, "absorb", absorb)
        ranks = ThreadRanks(path, tmp_path / f"store-{absorb}", 2, page_size=4, max_tokens_per_step=12)
        for request in ranks.generate(PROMPTS, 16):
            expected = reference_logits(path, request.tokens[:-1])
            assert list(request.generated) == expected[len(request.prompt_ids) - 1 :].argmax(-1).tolist()
            assert (ranks.runners[1].observer.logits_of(request.id) - expected).abs().max() <= 1e-4
        ranks.close()


def test_yarn_in_the_spelling_of_published_checkpoints_means_the_same(tmp_path: Path) -> None:
    path = make_moe(tmp_path / "model", "deepseek_v3", rope_parameters=YARN)
    expected = reference_logits(path, PROMPTS[1])
    config = json.loads((path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    rope["type"] = rope.pop("rope_type")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (path / "config.json").write_text(json.dumps(config))
    with LLM(path, logits="all", observer=Memory) as llm:
        llm.generate([PROMPTS[1]], max_new_tokens=1)
        assert (llm.observer.logits_of("0") - expected).abs().max() <= 1e-4


def test_a_position_costs_one_latent_on_every_rank(tmp_path: Path) -> None:
    path = make_moe(tmp_path / "model", "deepseek_v3")
    ranks = ThreadRanks(path, tmp_path / "store", 2)
    width = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
    expected = CacheLayout(num_layers=3, kv_heads=1, key_dim=width, value_dim=0)
    assert [runner.model.cache_layout() for runner in ranks.runners] == [expected] * 2
    assert expected.position_width == 3 * width
    ranks.close()


def test_latents_of_a_shared_prefix_are_used_again(tmp_path: Path) -> None:
    path = make_moe(tmp_path / "model", "deepseek_v2", seed=2)
    with LLM(path, page_size=4) as llm:
        first = llm.generate([PROMPTS[1]], max_new_tokens=8, ignore_eos=True)[0]
        again = llm.generate([[*PROMPTS[1][:30], 7, 8]], max_new_tokens=8, ignore_eos=True)[0]
        assert llm.engine.scheduler.counters.cached_tokens == 28  # seven whole pages of the 30 tokens both begin with
    for generation in (first, again):
        tokens = [*generation.prompt_ids, *generation.token_ids]
        choices = reference_logits(path, tokens[:-1]).argmax(-1).tolist()
        assert list(generation.token_ids) == choices[len(generation.prompt_ids) - 1 :]


def test_kv_b_proj_is_called_in_every_step_where_somebody_watches_it(tmp_path: Path) -> None:
    """An absorbing step does not need it; a hook must see the step's rows all the same, with the module's values."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    with LLM(make_moe(tmp_path / "model", "deepseek_v3")) as llm:
        module = llm.model.model.layers[1].self_attn.kv_b_proj
        handle = module.register_forward_hook(lambda _, args, output: seen.append((args[0], output)))
        (watched,) = llm.generate([PROMPTS[0]], max_new_tokens=5, ignore_eos=True)
        handle.remove()
        assert [len(latent) for latent, _ in seen] == [3, 1, 1, 1, 1]
        assert all(torch.equal(output, latent @ module.weight.T) for latent, output in seen[1:])
        (unwatched,) = llm.generate([PROMPTS[0]], max_new_tokens=5, ignore_eos=True)
    assert (len(seen), unwatched.token_ids) == (5, watched.token_ids)


def test_layers_that_predict_further_tokens_are_left_alone(tmp_path: Path) -> None:
    path = make_moe(tmp_path / "model", "deepseek_v3", num_nextn_predict_layers=1)
    with LLM(path) as llm:
        expected = llm.generate(PROMPTS, max_new_tokens=2)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.3.enorm.weight"] = torch.ones(64)
    save_file(weights, path / "model.safetensors")
    with LLM(path) as llm:
        assert llm.generate(PROMPTS, max_new_tokens=2) == expected
    config = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"model.layers.3.enorm.weight is unexpected"):
        LLM(path)


def test_a_split_of_heads_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tp=3 does not divide the model's 4 heads"):
        LLM(make_moe(tmp_path / "model", "deepseek_v3"), tp=3)
    path = make_moe(tmp_path / "odd", "deepseek_v3", qk_rope_head_dim=6)
    config = json.loads((path / "config.json").read_text()) | {"qk_rope_head_dim": 7}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="qk_rope_head_dim is 7; rotary embedding needs an even one"):
        LLM(path)
