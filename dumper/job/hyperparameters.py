"""Read the hyperparameters that determine tensor shapes from a model's config, under uniform names."""

from collections.abc import Mapping
from typing import Any

from torch import nn

_SPELLINGS: dict[str, tuple[str, ...]] = {
    "vocab_size": (),
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("ffn_hidden_size", "n_inner"),
    "num_hidden_layers": ("num_layers", "n_layer"),
    "num_attention_heads": ("n_head", "num_heads"),
    "num_key_value_heads": ("num_query_groups", "num_kv_heads"),
    "head_dim": ("kv_channels",),
    "rms_norm_eps": ("layernorm_epsilon", "layer_norm_epsilon"),
    "num_experts": ("num_moe_experts", "num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("moe_router_topk",),
    "n_group": ("moe_router_num_groups",),
    "topk_group": ("moe_router_group_topk",),
}
"""Field name in Hugging Face's LlamaConfig -> equivalent names in Megatron, GPT-2 and other configs."""


def hyperparameters(model: nn.Module) -> dict[str, int | float]:
    """Return the hyperparameters from ``model.config`` of a Hugging Face or Megatron model; empty without a config.

    Never raises.
    """
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    if callable(text):
        try:
            config = text()
        except Exception:  # noqa: BLE001 - third-party config; the outer config still has some values
            config = getattr(model, "config", None)
    numbers = {name: _number(config, (name, *others)) for name, others in _SPELLINGS.items()}
    if numbers["vocab_size"] is None:
        numbers["vocab_size"] = _number(model, ("vocab_size",))  # Megatron stores it on the model
    if not numbers["num_experts"]:
        numbers["num_experts_per_tok"] = None  # Megatron sets a value for dense models too
    return complete({name: value for name, value in numbers.items() if value is not None})


def complete(known: Mapping[str, int | float]) -> dict[str, int | float]:
    """Add defaults for missing values: ``num_key_value_heads`` = query heads, ``head_dim`` = hidden size / heads."""
    full = dict(known)
    heads, hidden = full.get("num_attention_heads"), full.get("hidden_size")
    if heads:
        full.setdefault("num_key_value_heads", heads)
    if heads and hidden:
        full.setdefault("head_dim", hidden // heads)
    return full


def _number(holder: Any, names: tuple[str, ...]) -> int | float | None:
    for name in names:
        try:
            value = getattr(holder, name, None)
        except Exception:  # noqa: BLE001 - a property of a third-party config
            value = vars(holder).get(name)  # transformers raises for fields that layers override, e.g. Gemma 4's heads
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
    return None
