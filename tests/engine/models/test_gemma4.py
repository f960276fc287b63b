"""Gemma 4 text models: two KV cache layouts, shared keys under preemption, published and unsupported settings."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, with_config
from engine_helpers import check_parity, reference_logits
from moe_checkpoints import make_moe
from transformers import Gemma4TextConfig

from tapscope.core.errors import CheckpointError
from tapscope.engine import LLM
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.cache_layout import CacheGroup, CacheLayout
from tapscope.engine.kv_cache.kv_cache import KVCache
from tapscope.engine.kv_cache.kv_format import KVFormat

PROMPTS = [[5, 6, 7], [(11 * i + i // 3) % 500 for i in range(50)], [300]]
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gemma4") / "model", "gemma4", seed=3)


def test_preemption_does_not_change_tokens(path: Path) -> None:
    """Of the two layers with a KV cache, one has 2 heads of 24 features, the other one head of 40."""
    with LLM(path, page_size=4, num_pages=22, max_num_batched_tokens=9, check_invariants=True) as llm:
        generations = llm.generate([*PROMPTS, PROMPTS[1][:20]], max_new_tokens=20, ignore_eos=True)
        assert llm.engine.scheduler.stats.num_preemptions > 0
        full, sliding = llm.engine.state()["kv_groups"]
        assert full["bytes_total"] == full["pages_total"] * 4 * 2 * 40 * 4
        assert sliding["bytes_total"] == sliding["pages_total"] * 4 * 2 * 2 * 24 * 4
    for generation in generations:
        tokens = [*generation.prompt_ids, *generation.token_ids]
        assert list(generation.token_ids) == reference_logits(path, tokens[:-1]).argmax(-1)[-20:].tolist()


@pytest.mark.parametrize("tp", [1, 2])
def test_two_layouts_in_one_group_of_layers(tmp_path: Path, tp: int) -> None:
    """The window equals the model's positions, so all layers share page tables."""
    path = make_checkpoint(tmp_path / "model", "gemma4", seed=5, sliding_window=256, attention_bias=True)
    check_parity(path, tp, PROMPTS, 8, max_num_batched_tokens=7)
    with LLM(path) as llm:
        assert len(llm.engine.state()["kv_groups"]) == 1
        assert llm.engine.state()["kv_bytes_per_token"] == 2 * (40 + 2 * 24) * 4


def test_accepted_rows_of_a_draft_tree_move_in_every_layout_of_their_group() -> None:
    small, large = CacheLayout(kv_heads=2, key_dim=6, value_dim=6), CacheLayout(kv_heads=1, key_dim=10, value_dim=10)
    groups = [CacheGroup({1: large, 2: small}, 3), CacheGroup({0: small}, 3)]
    cache = KVCache(groups, 4, KVFormat(torch.float32, torch.float32))
    slots, rows = torch.arange(12), {}
    for layer, layout in enumerate((small, large, small)):
        rows[layer] = torch.randn(12, layout.kv_heads, layout.key_dim)
        cache.write(layer, slots, rows[layer], -rows[layer])
    cache.move(0, torch.tensor([5, 7]), torch.tensor([4, 5]))
    for layer, order in ((0, [4, 5]), (1, [5, 7]), (2, [5, 7])):
        keys, values = cache.positions(layer, torch.tensor([4, 5]))
        assert torch.equal(keys, rows[layer][order])
        assert torch.equal(values, -rows[layer][order])


def test_fp8_weights_leave_the_router_as_it_is(tmp_path: Path) -> None:
    path = make_moe(tmp_path / "model", "gemma4_moe", seed=2)
    with LLM(path, quantization="fp8") as llm:
        layer = llm.model.model.layers[0]
        assert layer.router.proj.weight.dtype == torch.float32
        assert layer.mlp.gate_up_proj.weight.dtype == layer.experts.gate_up_proj.dtype == torch.float8_e4m3fn
        assert len(llm.generate([PROMPTS[0]], max_new_tokens=2)[0].token_ids) == 2


VARIANTS: dict[str, dict[str, Any]] = {
    "as E2B": {"attention_k_eq_v": False, "num_global_key_value_heads": 1},
    "as 31B": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False},
    "full layers only": {"layer_types": [FULL] * 4, "num_key_value_heads": 1},
    "other ropes": {
        "rope_parameters": {
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.6, "rope_theta": 1e3, "factor": 3.0},
            SLIDING: {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        }
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_transformers(tmp_path: Path, name: str) -> None:
    path = make_checkpoint(tmp_path / "model", "gemma4", seed=6, **VARIANTS[name])
    check_parity(path, 2 if name == "as 31B" else 1, PROMPTS, 6, max_num_batched_tokens=16)


def test_config_is_read_as_published_and_as_transformers_writes_it(tmp_path: Path) -> None:
    published = {
        "architectures": ["Gemma4ForCausalLM"],
        "attention_k_eq_v": True,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_size": 2816,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 2112,
        "model_type": "gemma4_text",
        "num_attention_heads": 16,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 12,
        "num_key_value_heads": 8,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
        "vocab_size": 262144,
    }
    theirs = Gemma4TextConfig(**published)
    read = []
    for values in (published, theirs.to_dict() | {"architectures": ["Gemma4ForCausalLM"]}):
        (tmp_path / "config.json").write_text(json.dumps(values))
        read.append(ModelConfig.read(tmp_path))
    ours = read[0]
    assert (ours.rope, ours.local_rope, ours.moe) == (read[1].rope, read[1].local_rope, read[1].moe)
    for layer in range(12):
        their = theirs.per_layer_config[layer]
        for each in read:
            sizes = each.of_layer(layer)
            assert (sizes.num_kv_heads, sizes.head_dim) == (their.num_key_value_heads, their.head_dim)
    assert ours.layer_types == tuple(theirs.layer_types)
    assert (ours.max_positions, ours.tie_word_embeddings, ours.layer_inputs) == (131072, True, None)
    assert ours.facts()["global_head_dim"] == 512


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'; only causal attention"),
        ({"layer_types": [FULL, SLIDING, FULL, SLIDING]}, "layer_types is .*; the last layer must have full_attention"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3; no layer of full_attention is left"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4; expected an integer from 0 to 3"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling is .*; this architecture reads rope_parameters"),
        ({"rope_parameters": {SLIDING: {}}}, "rope_parameters is .*; it must hold settings for full_attention"),
        (
            {"rope_parameters": {FULL: {"rope_type": "longrope"}, SLIDING: {}}},
            "rope_type is 'longrope'; supported rope types",
        ),
        (
            {"rope_parameters": {FULL: {"rope_type": "proportional", "partial_rotary_factor": 1.5}, SLIDING: {}}},
            r"partial_rotary_factor is 1\.5; expected a number above 0 and at most 1",
        ),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input is -1; expected an integer from 0"),
        ({"vocab_size_per_layer_input": 8}, "vocab_size_per_layer_input is 8; it must be at least vocab_size, 512"),
        ({"enable_moe_block": True}, "num_experts is None; expected an integer above 0"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8},
            "top_k_experts is 5; there are 4 experts to choose from",
        ),
        ({"per_layer_config": {"1": {"intermediate_size": 8}}}, "intermediate_size is 8; per_layer_config of layer 1"),
        ({"per_layer_config": {"1": {"head_dim": 40}}}, "per_layer_config is .*; layers of one type must have equal"),
        ({"per_layer_config": {"late": {"head_dim": 40}}}, "per_layer_config is .*; its keys must be layers, 0 to 3"),
        (
            {"per_layer_config": None, "global_head_dim": 41},
            "global_head_dim is 41; layers of full_attention have .* heads of 41 features; the head size must be even",
        ),
    ],
)
def test_gemma4_config_errors_name_field_and_rule(
    path: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.read(with_config(tmp_path, path, change))
