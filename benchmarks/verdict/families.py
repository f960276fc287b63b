"""Families: configs of small models of known architectures."""

import copy
import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.verdict.workload import BOS, VOCAB
from tapscope.core.errors import UsageError

_DENSE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": BOS,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MOE = {"num_experts_per_tok": 2, "num_hidden_layers": 3}
_DEEPSEEK = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_QWEN2_MOE = {"num_experts": 6, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64}
_LLAMA4 = {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "intermediate_size": 96,
    "intermediate_size_mlp": 160,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 8,
}
_GEMMA3 = {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "sliding_window": 6,
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": True,
}
_GPT_OSS = {
    "num_hidden_layers": 5,
    "head_dim": 16,
    "intermediate_size": 48,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
}
_NEOX = {name: value for name, value in _DENSE.items() if name != "num_key_value_heads"} | {"rotary_pct": 0.5}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture."""

    name: str
    classes: str
    """Prefix of the class names in transformers, e.g. ``Llama``."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def config(self, changes: Mapping[str, Any] | None = None) -> Any:
        """Return the transformers config with changed fields; raises UsageError for an unknown field."""
        import transformers

        kind = getattr(transformers, f"{self.classes}Config")
        known = kind(**self.settings)
        unknown = [name for name in changes or {} if not hasattr(known, name)]
        if unknown:
            raise UsageError(f"{type(known).__name__} has no {unknown[0]!r}")
        return kind(**copy.deepcopy({**self.settings, **(changes or {})}))  # transformers modifies its dicts


FAMILIES = {
    family.name: family
    for family in (
        Family("llama", "Llama", _DENSE | {"tie_word_embeddings": False}),
        Family("llama-tied", "Llama", _DENSE | {"tie_word_embeddings": True, "num_hidden_layers": 3}, 1),
        Family("llama-bias", "Llama", _DENSE | {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 3}, 10),
        Family("llama3", "Llama", _DENSE | {"rope_parameters": _LLAMA3, "num_key_value_heads": 1}, 2),
        Family("llama-deep", "Llama", _DENSE | {"num_hidden_layers": 10, "hidden_size": 96, "head_dim": 24}, 3),
        Family("qwen2", "Qwen2", _DENSE | {"tie_word_embeddings": False}, 4),
        Family("qwen3", "Qwen3", _DENSE | {"head_dim": 32, "tie_word_embeddings": False}, 5),
        Family(
            "qwen3-moe",
            "Qwen3Moe",
            _DENSE | _MOE | {"num_experts": 8, "moe_intermediate_size": 48, "head_dim": 16, "norm_topk_prob": True},
            6,
        ),
        Family("mixtral", "Mixtral", _DENSE | _MOE | {"num_local_experts": 4, "intermediate_size": 96}, 7),
        Family(
            "gemma2",
            "Gemma2",
            _DENSE | {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16, "final_logit_softcapping": 8.0},
            8,
        ),
        Family("gemma3", "Gemma3Text", _DENSE | _GEMMA3, 31),
        Family("gpt2", "GPT2", {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128}, 9),
        Family("deepseek-v3", "DeepseekV3", _DENSE | _DEEPSEEK, 21),
        Family("olmo2", "Olmo2", _DENSE | {"tie_word_embeddings": False}, 23),
        Family("gpt-neox", "GPTNeoX", _NEOX, 24),
        Family("phi3", "Phi3", _DENSE | {"tie_word_embeddings": False}, 25),
        Family("qwen2-moe", "Qwen2Moe", _DENSE | _MOE | _QWEN2_MOE, 29),
        Family("llama4", "Llama4Text", _DENSE | _LLAMA4, 101),
        Family("gpt-oss", "GptOss", _DENSE | _GPT_OSS, 120),
    )
}


def family(name: str) -> Family:
    """Return the family with this name; raises UsageError for an unknown one."""
    if name not in FAMILIES:
        raise UsageError(f"there is no family {name!r}; families are {', '.join(FAMILIES)}")
    return FAMILIES[name]


@functools.cache
def modeling(name: str) -> Any:
    """Return the modeling module of a family in transformers, to patch its functions, e.g. ``modeling("llama")``."""
    package = "llama" if name.startswith("llama") else name.replace("-", "_")
    return importlib.import_module(f"transformers.models.{package}.modeling_{package}")
