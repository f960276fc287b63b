"""Family: defaults and reader for config.json of an architecture; fields and rules shared by several families."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tapscope.engine.hf_config.config_reader import ConfigReader
from tapscope.engine.hf_config.rope_config import Rope, read_rope

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
"""Supported MLP activations, by their transformers names."""

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
CHUNKED, HYBRID = "chunked_attention", "hybrid"
MLP, EXPERTS = "mlp", "moe"
"""Layer kinds, by their transformers names."""

Fields = dict[str, Any]
"""Keyword arguments of ModelConfig."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An architecture: defaults for fields that config.json may omit, and a reader for its specific fields."""

    model_type: str
    read: Callable[[ConfigReader, Fields], Fields]
    """Function from the shared fields to the family's own fields; may raise CheckpointError."""
    prepare: Callable[[ConfigReader], ConfigReader] | None = None
    """Function that renames the family's keys to those that :func:`shared_fields` reads."""
    head_dim: int | None = None
    """Default head size; None: hidden_size / num_attention_heads."""
    num_kv_heads: int | None = None
    """Default number of key/value heads; None: equal to the number of heads."""
    max_positions: int = 2048
    rms_norm_eps: float = 1e-6
    tied: bool = False
    is_multimodal: bool = False
    """Whether the decoder's settings are in ``text_config``."""
    text_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults in ``text_config`` for fields that other families require."""
    activation_key: str = "hidden_act"
    activation: str = "silu"
    activations: tuple[str, ...] = ACTIVATIONS


def shared_fields(reader: ConfigReader, family: Family) -> Fields:
    """Read the fields that all architectures share; raises CheckpointError."""
    reader.refuse("use_bidirectional_attention", (False,), "only causal attention is supported")
    num_heads, hidden_size = reader.count("num_attention_heads"), reader.count("hidden_size")
    num_kv_heads = reader.optional_count("num_key_value_heads", family.num_kv_heads) or num_heads
    head_dim = reader.count("head_dim", family.head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise reader.fail("num_key_value_heads", f"{num_kv_heads} key/value heads do not divide {num_heads} heads")
    if head_dim % 2:
        raise reader.fail("head_dim", f"the head size is {head_dim}; rotary embedding needs an even one")
    return {
        "vocab_size": reader.count("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": reader.count("intermediate_size"),
        "num_layers": reader.count("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "attention_scale": head_dim**-0.5,
        "activation": reader.choice(family.activation_key, family.activations, family.activation),
        "rms_norm_eps": reader.number("rms_norm_eps", family.rms_norm_eps),
        "max_positions": reader.count("max_position_embeddings", family.max_positions),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", family.tied),
    }


def rope_fields(rope: Rope, shared: Fields) -> Fields:
    """Return ``rope``, for all layers or those with full attention, and the number of positions that it supports."""
    return {"rope": rope, "max_positions": rope.reach(shared["max_positions"])}


def one_rope(reader: ConfigReader, shared: Fields, theta: float = 1e4) -> Fields:
    """Read a rotary embedding that is equal in all layers; ``theta`` is the default of ``rope_theta``."""
    return rope_fields(read_rope(reader, shared["head_dim"], shared["max_positions"], theta), shared)


def attention_bias(reader: ConfigReader, *, default: bool = False) -> Fields:
    """Read ``attention_bias``: whether all projections of attention have biases."""
    bias = reader.flag("attention_bias", default)
    return {"qkv_bias": bias, "o_bias": bias}


def layer_kinds(reader: ConfigReader, derived: list[str], other: str = SLIDING) -> tuple[str, ...]:
    """Read ``layer_types``, by default ``derived``: one kind per layer. Raises CheckpointError.

    ``other`` is the kind of layers without full attention.
    """
    given = reader.get("layer_types", derived)
    known = isinstance(given, list) and all(kind in (FULL, other) for kind in given)
    if not known or len(given) != len(derived):
        raise reader.fail("layer_types", f"it must name {FULL} or {other} for each of {len(derived)} layers")
    return tuple(given)


def windows(reader: ConfigReader, kinds: tuple[str, ...], window: int | None) -> Fields:
    """Return ``layer_types`` and ``sliding_window``; raises CheckpointError for sliding layers without a window."""
    if window is None and SLIDING in kinds:
        raise reader.fail("layer_types", f"layers of {SLIDING} need a sliding_window (and use_sliding_window)")
    return {"layer_types": kinds, "sliding_window": window if SLIDING in kinds else None}


def one_kind(reader: ConfigReader, shared: Fields, kind: str) -> tuple[str, ...]:
    """Return ``kind`` for all layers; other ``layer_types``, which transformers would ignore, raise CheckpointError."""
    derived = [kind] * shared["num_layers"]
    reader.refuse("layer_types", (derived,), f"this architecture has layers of {kind} only")
    return tuple(derived)


def one_window(reader: ConfigReader, shared: Fields, window: int | None) -> Fields:
    """Return the fields for the same ``window`` in all layers (None: full attention).

    Raises CheckpointError if ``layer_types`` has other kinds.
    """
    return windows(reader, one_kind(reader, shared, FULL if window is None else SLIDING), window)


def layers_without_rope(reader: ConfigReader, num_layers: int) -> frozenset[int]:
    """Return the layers without rotary embedding: those with 0 in ``no_rope_layers``.

    Without this key, every ``no_rope_layer_interval``-th layer. Raises CheckpointError.
    """
    interval = reader.count("no_rope_layer_interval", 4)
    given = reader.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(num_layers)]
    if not isinstance(given, list) or len(given) < num_layers or any(value not in (0, 1) for value in given):
        raise reader.fail("no_rope_layers", f"expected 0 or 1 for each of {num_layers} layers")
    return frozenset(layer for layer in range(num_layers) if not given[layer])


def unrotated(shared: Fields) -> Fields:
    """Return the fields of a model without rotary embedding."""
    return {"rope": Rope(), "no_rope_layers": frozenset(range(shared["num_layers"]))}
