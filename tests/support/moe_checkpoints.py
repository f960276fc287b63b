"""Tiny real mixture-of-experts checkpoints for tests, created by transformers itself; contains no tests."""

from pathlib import Path
from typing import Any

import torch
from checkpoints import TINY, tokenizer_json
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

COMMON: dict[str, Any] = {**TINY, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
}
INDEXED: dict[str, Any] = {
    "index_topk": 6,
    "index_head_dim": 12,
    "index_n_heads": 14,  # avoids zero scores: the choice among equal scores is undefined
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
DELTA_NET: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rms_norm_eps": 1e-3,  # head norms would amplify rounding of tiny sums
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
}
FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen2_moe": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {
            "num_experts": 8,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
        },
    ),
    "qwen3_next": (
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        {
            "num_experts": 8,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        }
        | DELTA_NET,
    ),
    "qwen3_5_moe": (
        Qwen3_5MoeTextConfig,
        Qwen3_5MoeForCausalLM,
        DELTA_NET | {"num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 40},
    ),
    "gpt_oss": (
        GptOssConfig,
        GptOssForCausalLM,
        {
            "num_local_experts": 8,
            "head_dim": 16,
            "sliding_window": 9,
            "swiglu_limit": 1.5,  # reached by small weights
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
            | {"rope_theta": 150000.0, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        },
    ),
    "jamba": (
        JambaConfig,
        JambaForCausalLM,
        {"num_experts": 8, "intermediate_size": 32, "attn_layer_period": 3, "attn_layer_offset": 1}
        | {"mamba_d_state": 6, "mamba_dt_rank": 5, "mamba_proj_bias": True},
    ),
    "nemotron_h": (
        NemotronHConfig,
        NemotronHForCausalLM,
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention"],
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 14,
            "n_groups": 2,
            "ssm_state_size": 10,
            "use_bias": True,
            "n_routed_experts": 8,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 48,
            "routed_scaling_factor": 1.5,
        },
    ),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM, {"num_experts": 8, "intermediate_size": 32, "pad_token_id": 0}),
    "glm4_moe": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        {
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "minimax_m2": (
        MiniMaxM2Config,
        MiniMaxM2ForCausalLM,
        {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 8, "intermediate_size": 32},
    ),
    "llama4": (
        Llama4TextConfig,
        Llama4ForCausalLM,
        {
            "head_dim": 16,
            "num_local_experts": 8,
            "intermediate_size_mlp": 80,
            "moe_layers": [0, 2],
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 9,
            "floor_scale": 8,
        },
    ),
    "kimi_linear": (
        KimiLinearConfig,
        KimiLinearForCausalLM,
        {key: value for key, value in LATENT.items() if key not in ("q_lora_rank", "n_routed_experts")}
        | {
            "num_local_experts": 8,
            "linear_head_dim": 12,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "rms_norm_eps": 1e-3,  # head norms would amplify rounding of tiny sums
            "pad_token_id": 0,
        },
    ),
    "gemma4_moe": (
        Gemma4TextConfig,
        Gemma4ForCausalLM,
        {
            "head_dim": 16,
            "global_head_dim": 24,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM, LATENT | {"routed_scaling_factor": 1.5}),
    "deepseek_v3": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        LATENT | {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "num_nextn_predict_layers": 0},
    ),
    "deepseek_v32": (DeepseekV32Config, DeepseekV32ForCausalLM, LATENT | INDEXED | {"n_group": 4, "topk_group": 2}),
    "glm_moe_dsa": (
        GlmMoeDsaConfig,
        GlmMoeDsaForCausalLM,
        LATENT | INDEXED | {"n_group": 1, "topk_group": 1, "indexer_types": ["full", "shared", "full"]},
    ),
}


def make_moe(
    path: Path, family: str, *, seed: int = 0, dtype: str = "float32", stacked: bool = False, **config: Any
) -> Path:
    """Save a random model of ``family`` (a key of FAMILIES; hidden 64, 3 layers) with a tokenizer and return ``path``.

    ``stacked`` stores experts as transformers does in memory, otherwise separately as in published checkpoints. Norms,
    biases and the choice bias of DeepSeek-V3 are random too, so that a wrong one has an effect.
    """
    config_class, model_class, settings = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**(COMMON | settings | config)))
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name or name.endswith((".scale", "per_expert_scale", "layer_scalar")):
                is_offset = (
                    family in ("qwen3_next", "qwen3_5_moe") and "linear_attn" not in name
                )  # the norm multiplies by 1 + weight
                torch.nn.init.normal_(tensor, 0.0 if is_offset else 1.0, 0.1)
            elif name.endswith("bias"):
                torch.nn.init.normal_(tensor, 0.0, 0.1)
            elif name.endswith("A_log"):  # slow decay: the norm would amplify rounding of tiny sums
                torch.nn.init.uniform_(tensor, -5.0, -2.0)
            elif name.endswith("conv1d.weight"):
                torch.nn.init.normal_(tensor, 0.0, 0.7)
            elif name.endswith("sinks"):
                torch.nn.init.normal_(tensor, 0.0, 2.0)
            elif name.endswith(("gate.weight", "router.weight", "router.proj.weight")):
                torch.nn.init.normal_(tensor, 0.0, 0.5)
    model.to(getattr(torch, dtype)).save_pretrained(path, save_original_format=not stacked)
    (path / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    return path


def make_qwen3_5(path: Path, *, seed: int = 0) -> Path:
    """Save a random dense Qwen3.5 (hidden 64, 3 layers) with a tokenizer to ``path`` and return ``path``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**(TINY | DELTA_NET)))
        for name, tensor in model.named_parameters():
            if name.endswith("A_log"):
                torch.nn.init.uniform_(tensor, -5.0, -2.0)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    return path
