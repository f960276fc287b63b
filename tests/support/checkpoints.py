"""Tiny real Hugging Face checkpoints for tests, created by transformers itself; contains no tests."""

import functools
import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
    Zamba2Config,
    Zamba2ForCausalLM,
)

VOCAB_SIZE = 512
TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.1,
}
"""Config fields that all families share."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""Llama 3.1 scaling whose three wavelength bands all occur within a small head."""


PHI4_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 256,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
}
"""The RoPE type of Phi-4-mini, for 12 of a head's 16 features; tiny models stay within the short factors."""


@functools.cache
def tokenizer_json() -> str:
    """Return a byte-level BPE of VOCAB_SIZE tokens, trained on a few modules of the standard library (about a
    second)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([inspect.getsource(module) for module in (textwrap, json, functools)], trainer)
    return tokenizer.to_str()


FAMILIES: dict[str, tuple[type, type[PreTrainedModel], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 11}),
    "ministral3": (
        Ministral3Config,
        Ministral3ForCausalLM,
        {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0}
            | {"original_max_position_embeddings": 8, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
        },
    ),
    "qwen2": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24}),
    "smollm3": (
        SmolLM3Config,
        SmolLM3ForCausalLM,
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 9, "pad_token_id": 0},
    ),
    "phi3": (
        Phi3Config,
        Phi3ForCausalLM,
        {"sliding_window": 9, "pad_token_id": 0, "rope_parameters": PHI4_ROPE},
    ),
    "glm": (GlmConfig, GlmForCausalLM, {"head_dim": 16, "pad_token_id": 0}),
    "glm4": (Glm4Config, Glm4ForCausalLM, {"head_dim": 24, "pad_token_id": 0}),
    "cohere": (CohereConfig, CohereForCausalLM, {"logit_scale": 0.7}),
    "cohere2": (
        Cohere2Config,
        Cohere2ForCausalLM,
        {"sliding_window": 9, "sliding_window_pattern": 2, "logit_scale": 0.3, "attention_bias": True},
    ),
    "starcoder2": (Starcoder2Config, Starcoder2ForCausalLM, {"sliding_window": 9}),
    "falcon_h1": (
        FalconH1Config,
        FalconH1ForCausalLM,
        {
            "num_hidden_layers": 2,  # two mixers each, so that rounding matches three layers of others
            "mamba_d_ssm": 72,
            "mamba_n_heads": 6,
            "mamba_n_groups": 2,
            "mamba_d_state": 10,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "projectors_bias": True,
            "ssm_multipliers": [0.8, 1.2, 0.9, 1.1, 0.7],
            "mlp_multipliers": [0.9, 0.8],
            "key_multiplier": 0.7,
            "lm_head_multiplier": 0.6,
            "embedding_multiplier": 1.5,
            "attention_in_multiplier": 1.1,
            "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.7,
        },
    ),
    "mamba2": (
        Mamba2Config,
        Mamba2ForCausalLM,
        {"num_heads": 8, "head_dim": 18, "hidden_size": 48, "expand": 3, "n_groups": 2, "state_size": 10}
        | {"use_bias": True, "pad_token_id": 0},
    ),
    "bamba": (
        BambaConfig,
        BambaForCausalLM,
        {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 10}
        | {"mamba_proj_bias": True, "attention_bias": True, "pad_token_id": 0},
    ),
    "zamba2": (
        Zamba2Config,
        Zamba2ForCausalLM,
        {"num_hidden_layers": 5, "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid", "hybrid"]}
        | {"num_mem_blocks": 2, "num_key_value_heads": 4, "n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_d_state": 10}
        | {"use_shared_attention_adapter": True, "adapter_rank": 6, "use_mem_rope": True, "add_bias_linear": True},
    ),
    "lfm2": (
        Lfm2Config,
        Lfm2ForCausalLM,
        {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True, "block_multiple_of": 8},
    ),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {}),
    "olmo3": (
        Olmo3Config,
        Olmo3ForCausalLM,
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "granite": (
        GraniteConfig,
        GraniteForCausalLM,
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.5,
        },
    ),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {"head_dim": 24, "sliding_window": 7, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0},
    ),
    "gemma3n": (
        Gemma3nTextConfig,
        Gemma3nForCausalLM,
        {
            "num_hidden_layers": 4,
            "head_dim": 24,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 500,
            "hidden_size_per_layer_input": 12,
            "altup_num_inputs": 3,
            "laurel_rank": 10,
            "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0],
            "intermediate_size": [96, 80, 96, 64],
        },
    ),
    "gemma4": (
        Gemma4TextConfig,
        Gemma4ForCausalLM,
        {
            "num_hidden_layers": 4,
            "head_dim": 24,
            "global_head_dim": 40,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": 600,
            "hidden_size_per_layer_input": 12,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {"head_dim": 24, "sliding_window": 8, "query_pre_attn_scalar": 20, "sliding_window_pattern": 2},
    ),
}
"""Family -> config class and model class in transformers, and settings that exercise its special features in a tiny
model."""


def make_llama(path: Path, **settings: Any) -> Path:
    """Call :func:`make_checkpoint` for the Llama family."""
    return make_checkpoint(path, "llama", **settings)


def make_checkpoint(
    path: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str = "1GB",
    **config: Any,
) -> Path:
    """Save a random model (hidden 64, 3 layers) with a tokenizer to ``path`` and return ``path``.

    ``config`` overrides fields of the family's config. Norm weights and biases are random too, so that a wrong one has
    an effect.
    """
    config_class, model_class, special = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**(TINY | special | config)))
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name or name.endswith(("correct_output_scale", "layer_scalar")):
                torch.nn.init.normal_(parameter, 0.0 if family in ("gemma2", "gemma3") else 1.0, 0.1)
            elif name.endswith("bias"):
                torch.nn.init.normal_(parameter, 0.0, 0.1)
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=max_shard_size)
    if model.config.vocab_size >= VOCAB_SIZE:
        (path / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
        if family.startswith("gemma"):  # by default transformers expects the special tokens of Gemma's vocabulary
            (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return path


def with_config(folder: Path, model: Path, change: dict[str, Any]) -> Path:
    """Write a changed ``config.json`` of ``model`` to ``folder``; return ``folder``."""
    values = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | change))
    return folder
