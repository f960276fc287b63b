"""ModelConfig reads published config.json files as transformers does, and rejects settings that it cannot compute."""

import json
from pathlib import Path
from typing import Any

import checkpoints
import moe_checkpoints
import pytest
from moe_checkpoints import COMMON
from transformers import AutoConfig

from tapscope.core.errors import CheckpointError
from tapscope.engine.hf_config.model_config import FAMILIES, ModelConfig
from tapscope.engine.models.registry import MODELS

LLAMA_3_1 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
MISTRAL_V0_1 = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
QWEN_2_5 = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA_2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "eos_token_id": [1, 107],
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}
GEMMA_3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
SMOLLM_3 = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 128012,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 128256,
}
GRANITE_3_3 = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "logits_scaling": 16.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49159,
}
OLMO_2 = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 100352,
}
OLMO_3 = OLMO_2 | {
    "architectures": ["Olmo3ForCausalLM"],
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "sliding_window": 4096,
    "vocab_size": 100278,
}
PHI_4_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "eos_token_id": 199999,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "model_type": "phi3",
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [1.0 + i for i in range(48)],
        "short_factor": [1.0] * 48,
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 200064,
}
QWEN_1_5_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PUBLISHED = {
    "smollm3-3b": SMOLLM_3,
    "smollm3-by-default": {k: v for k, v in SMOLLM_3.items() if not k.startswith(("no_rope", "layer", "num_key"))},
    "smollm3-sliding": {k: v for k, v in SMOLLM_3.items() if k != "layer_types"}
    | {"use_sliding_window": True, "sliding_window": 512},
    "granite-3.3-8b": GRANITE_3_3,
    "granite-by-default": {k: v for k, v in GRANITE_3_3.items() if "multiplier" not in k and k != "logits_scaling"},
    "phi-4-mini": PHI_4_MINI,
    "phi-3-mini-4k": {k: v for k, v in PHI_4_MINI.items() if k not in ("rope_scaling", "partial_rotary_factor")}
    | {"sliding_window": 2047, "max_position_embeddings": 4096},
    "olmo-2-7b": OLMO_2,
    "olmo-2-by-default": {k: v for k, v in OLMO_2.items() if not k.startswith(("rms", "rope", "num_key", "max"))},
    "olmo-3-7b": OLMO_3,
    "olmo-3-by-default": {k: v for k, v in OLMO_3.items() if not k.startswith(("rope", "layer", "sliding"))},
    "qwen1.5-moe-a2.7b": QWEN_1_5_MOE,
    "qwen2-moe-sliding": QWEN_1_5_MOE | {"use_sliding_window": True},
    "llama-3.1-8b": LLAMA_3_1,
    "mistral-7b-v0.1": MISTRAL_V0_1,
    "mistral-7b-v0.3": MISTRAL_V0_1 | {"sliding_window": None, "rope_theta": 1e6},
    "mistral-by-default": {k: v for k, v in MISTRAL_V0_1.items() if k not in ("sliding_window", "num_key_value_heads")},
    "qwen2.5-0.5b": QWEN_2_5,
    "llama-ungrouped": LLAMA_3_1 | {"num_key_value_heads": None},
    "qwen2-sliding": QWEN_2_5 | {"use_sliding_window": True},
    "qwen2.5-yarn": QWEN_2_5
    | {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
    "qwen3-0.6b": QWEN_3,
    "qwen3-by-default": {k: v for k, v in QWEN_3.items() if k not in ("head_dim", "tie_word_embeddings")},
    "gemma-2-9b": GEMMA_2,
    "gemma-2-by-default": {k: v for k, v in GEMMA_2.items() if "softcapping" not in k and k != "head_dim"},
    "gemma-3-1b": GEMMA_3,
    "gemma-3-by-default": {
        k: v for k, v in GEMMA_3.items() if not k.startswith(("rope", "sliding", "query", "hidden_activation"))
    },
}


FAMILY_CONFIGS = {
    family: made
    for family, made in (checkpoints.FAMILIES | moe_checkpoints.FAMILIES).items()
    if family not in ("mamba2", "jamba", "nemotron_h", "kimi_linear")  # families without rotary embedding
}


def _write(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_model_config_reads_published_configs_like_transformers(tmp_path: Path, name: str) -> None:
    ours = ModelConfig.read(_write(tmp_path, PUBLISHED[name]))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.activation == (getattr(theirs, "hidden_activation", None) or theirs.hidden_act)
    window = getattr(theirs, "sliding_window", None)
    everywhere = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(theirs, "layer_types", None) or [everywhere] * theirs.num_hidden_layers
    assert ours.layer_types == tuple(kinds)
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    assert [ours.window(layer) for layer in range(ours.num_layers)] == windows
    scale = getattr(theirs, "query_pre_attn_scalar", ours.head_dim) ** -0.5
    assert ours.attention_scale == getattr(theirs, "attention_multiplier", scale)
    assert ours.embedding_multiplier == getattr(theirs, "embedding_multiplier", 1.0)
    assert ours.residual_multiplier == getattr(theirs, "residual_multiplier", 1.0)
    assert ours.logits_divisor == getattr(theirs, "logits_scaling", 1.0)
    has_rope = getattr(theirs, "no_rope_layers", [1] * ours.num_layers)
    assert [int(layer not in ours.no_rope_layers) for layer in range(ours.num_layers)] == has_rope
    assert ours.attention_softcap == getattr(theirs, "attn_logit_softcapping", None)
    assert ours.final_softcap == getattr(theirs, "final_logit_softcapping", None)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.dtype == "bfloat16"
    ropes = {None: theirs.rope_parameters} if ours.local_rope is None else theirs.rope_parameters
    for kind, rope in ropes.items():
        mine = ours.local_rope if kind == "sliding_attention" else ours.rope
        assert (mine.theta, mine.kind) == (rope["rope_theta"], rope["rope_type"])
        if mine.kind != "longrope":  # longrope derives the factor from the context lengths, also in transformers
            assert mine.factor == rope.get("factor", 1.0)


@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_model_config_has_the_rope_theta_of_transformers_by_default(tmp_path: Path, family: str) -> None:
    config_class, model_class, settings = FAMILY_CONFIGS[family]
    sizes = {name: value for name, value in (COMMON | settings).items() if name != "rope_parameters"}
    values = config_class(**sizes).to_dict() | {"architectures": [model_class.__name__]}
    values.pop("rope_parameters", None)
    ours = ModelConfig.read(_write(tmp_path, values))
    ropes = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert ours.rope.theta == ropes.get("full_attention", ropes)["rope_theta"]
    if ours.local_rope is not None:
        assert ours.local_rope.theta == ropes["sliding_attention"]["rope_theta"]


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "qwen3_5_moe", "gpt_oss", "minimax_m2"])
def test_model_config_has_the_experts_per_token_of_transformers_by_default(tmp_path: Path, family: str) -> None:
    config_class, model_class, settings = FAMILY_CONFIGS[family]
    values = config_class(**(COMMON | settings)).to_dict() | {"architectures": [model_class.__name__]}
    del values["num_experts_per_tok"]
    moe = ModelConfig.read(_write(tmp_path, values)).moe
    assert moe is not None
    assert moe.top_k == AutoConfig.from_pretrained(tmp_path).num_experts_per_tok


def test_rope_reach_of_yarn_without_extended_positions(tmp_path: Path) -> None:
    assert ModelConfig.read(_write(tmp_path, PUBLISHED["qwen2.5-yarn"])).max_positions == 131072


def test_registry_has_all_families() -> None:
    assert list(MODELS) == list(FAMILIES)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma3_text"])
def test_model_config_falls_back_to_model_type(tmp_path: Path, model_type: str) -> None:
    values = next(v for v in PUBLISHED.values() if v["model_type"] == model_type)
    whole = ModelConfig.read(_write(tmp_path, values))
    assert ModelConfig.read(_write(tmp_path, {k: v for k, v in values.items() if k != "architectures"})) == whole


ROPES = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        (LLAMA_3_1, {"torch_dtype": {"": "float32"}}, "torch_dtype is .*; expected the name of a dtype, such as"),
        (MISTRAL_V0_1, {"attention_bias": True}, "attention_bias is True; this architecture has no biases"),
        (SMOLLM_3, {"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\]; expected 0 or 1 for each of 36 layers"),
        (GRANITE_3_3, {"logits_scaling": 0}, "logits_scaling is 0; expected a number above 0"),
        (PHI_4_MINI, {"partial_rotary_factor": 0.3}, r"partial_rotary_factor is 0\.3; it gives 38|short_factor is"),
        (PHI_4_MINI, {"rope_scaling": {"type": "linear"}}, "type is 'linear'; supported rope types: default, longrope"),
        (PHI_4_MINI, {"rope_scaling": {"type": "su"}}, "short_factor is None; expected a list of 48 numbers above 0"),
        (QWEN_1_5_MOE, {"num_experts_per_tok": 61}, "num_experts_per_tok is 61; there are 60 experts"),
        (MISTRAL_V0_1, {"rope_theta": float("inf")}, "rope_theta is inf; expected a number above 0"),
        (MISTRAL_V0_1, {"sliding_window": 0}, "sliding_window is 0; expected an integer above 0"),
        (
            MISTRAL_V0_1,
            {"layer_types": ["full_attention"] * 32},
            "layer_types is .*; .* layers of sliding_attention only",
        ),
        (QWEN_2_5, {"attention_bias": False}, "attention_bias is False; this architecture always has biases"),
        (QWEN_2_5, {"max_window_layers": -1}, "max_window_layers is -1"),
        (QWEN_2_5, {"layer_types": ["sliding_attention"] * 24}, "sliding_attention need a sliding_window"),
        (QWEN_2_5, {"layer_types": ["full_attention"]}, "layer_types is .*; it must name .* for each of 24 layers"),
        (
            QWEN_3,
            {"layer_types": ["linear_attention"] * 28},
            "layer_types is .*; it must name full_attention or sliding_",
        ),
        (QWEN_3, {"rope_scaling": {"rope_type": "longrope"}}, "rope_type is 'longrope'; supported rope types: default"),
        (QWEN_3, {"rope_scaling": {"type": "su"}}, "type is 'su'; supported rope types: default"),
        (QWEN_3, {"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5; only whole heads are rotated"),
        (
            GEMMA_2,
            {"hidden_activation": "tanh"},
            "hidden_activation is 'tanh'; supported: silu, gelu, gelu_pytorch_tanh",
        ),
        (GEMMA_2, {"attn_logit_softcapping": -1.0}, r"attn_logit_softcapping is -1\.0; expected a number above 0"),
        (GEMMA_2, {"sliding_window": None}, "layers of sliding_attention need a sliding_window"),
        (GEMMA_2, {"rope_parameters": ROPES}, "full_attention is .*; this architecture has one rope for all layers"),
        (GEMMA_3, {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50\.0; transformers does not apply it"),
        (GEMMA_3, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; only causal attention"),
        (
            GEMMA_3,
            {"rope_parameters": {"rope_type": "default"}},
            "rope_parameters is .*; it must hold settings for full_at",
        ),
        (GEMMA_3, {"rope_parameters": {"full_attention": 3}}, "full_attention is 3; expected a JSON object"),
        (GEMMA_3, {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        (
            GEMMA_3,
            {"architectures": ["Gemma4UnifiedForConditionalGeneration"]},
            "not supported; supported: LlamaForCausalLM, ",
        ),
    ],
)
def test_model_config_rejects_unsupported_settings(
    tmp_path: Path, values: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{message}"):
        ModelConfig.read(_write(tmp_path, values | changes))
