"""Families: how config.json of each dense architecture is read, with the defaults of its transformers config class."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tapscope.engine.hf_config.config_reader import ConfigReader
from tapscope.engine.hf_config.gemma3n_config import gemma3n_layer_inputs, gemma3n_parts, shared_kv_layers
from tapscope.engine.hf_config.mamba_config import bamba_mamba, falcon_h1_mamba, mamba2_mamba, multipliers, zamba2_mamba
from tapscope.engine.hf_config.rope_config import Rope, partial_rope, read_phi3_rope, read_rope, rope_of
from tapscope.engine.hf_config.zamba2_config import zamba2_blocks

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
"""Activations of the MLP, by transformers' names."""

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
CHUNKED, HYBRID = "chunked_attention", "hybrid"
MLP, EXPERTS = "mlp", "moe"
"""Kinds of layer, by transformers' names."""

Fields = dict[str, Any]
"""Fields of ModelConfig."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An architecture: defaults for fields that config.json may omit, and the reader of its specific fields."""

    model_type: str
    read: Callable[[ConfigReader, Fields], Fields]
    """Takes the fields that all families share, returns the family's own; may raise CheckpointError."""
    prepare: Callable[[ConfigReader], ConfigReader] | None = None
    """Gives settings that the family calls differently the names that :func:`shared_fields` reads."""
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    num_kv_heads: int | None = None
    """None: as many as heads."""
    max_positions: int = 2048
    tied: bool = False
    is_multimodal: bool = False
    """Whether the decoder's settings are in ``text_config``."""
    text_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of ``text_config`` for fields that are required elsewhere."""
    activation_key: str = "hidden_act"
    activation: str = "silu"
    activations: tuple[str, ...] = ACTIVATIONS


def shared_fields(reader: ConfigReader, family: Family) -> Fields:
    """The fields that all architectures have, under the same names. Raises CheckpointError."""
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
        "rms_norm_eps": reader.number("rms_norm_eps", 1e-6),
        "max_positions": reader.count("max_position_embeddings", family.max_positions),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", family.tied),
    }


def one_rope(reader: ConfigReader, shared: Fields, theta: float = 1e4) -> Fields:
    """The same rotary embedding in all layers."""
    rope = read_rope(reader, shared["head_dim"], shared["max_positions"], theta)
    return {"rope": rope, "max_positions": rope.reach(shared["max_positions"])}


def layer_kinds(reader: ConfigReader, derived: list[str], other: str = SLIDING) -> tuple[str, ...]:
    """``layer_types`` of config.json, else ``derived``; one for each layer. Raises CheckpointError.

    ``other``: the kind of layers without full attention.
    """
    given = reader.get("layer_types", derived)
    known = isinstance(given, list) and all(kind in (FULL, other) for kind in given)
    if not known or len(given) != len(derived):
        raise reader.fail("layer_types", f"it must name {FULL} or {other} for each of {len(derived)} layers")
    return tuple(given)


def windows(reader: ConfigReader, kinds: tuple[str, ...], window: int | None) -> Fields:
    """``layer_types`` and ``sliding_window``; raises CheckpointError for sliding layers without a window."""
    if window is None and SLIDING in kinds:
        raise reader.fail("layer_types", f"layers of {SLIDING} need a sliding_window (and use_sliding_window)")
    return {"layer_types": kinds, "sliding_window": window if SLIDING in kinds else None}


def one_kind(reader: ConfigReader, shared: Fields, kind: str) -> tuple[str, ...]:
    """``kind`` for all layers; transformers ignores ``layer_types`` here, so that different ones are an error."""
    derived = [kind] * shared["num_layers"]
    reader.refuse("layer_types", (derived,), f"this architecture has layers of {kind} only")
    return tuple(derived)


def _no_softcaps(reader: ConfigReader) -> None:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        reader.refuse(name, (), "this architecture has no soft-cap; remove the key")


def _llama(reader: ConfigReader, shared: Fields) -> Fields:
    _no_softcaps(reader)
    bias = reader.flag("attention_bias")
    kinds = one_kind(reader, shared, FULL)
    biases = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": reader.flag("mlp_bias")}
    return one_rope(reader, shared) | biases | windows(reader, kinds, None)


def _mistral(reader: ConfigReader, shared: Fields) -> Fields:
    _no_softcaps(reader)
    reader.refuse("attention_bias", (False,), "this architecture has no biases")
    window = reader.optional_count("sliding_window", 4096)
    kinds = one_kind(reader, shared, FULL if window is None else SLIDING)
    return one_rope(reader, shared) | windows(reader, kinds, window)


_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _ministral3(reader: ConfigReader, shared: Fields) -> Fields:
    """As Mistral, with queries that are scaled by their position."""
    name = "rope_scaling" if reader.get("rope_scaling") else "rope_parameters"
    if not reader.get(name):
        reader = ConfigReader(reader.path, reader.values | {name: _MINISTRAL3_ROPE})
    window = reader.optional_count("sliding_window", None)
    kinds = one_kind(reader, shared, FULL if window is None else SLIDING)
    settings = reader.section(name) or reader
    temperature = {
        "temperature_floor": settings.count("original_max_position_embeddings"),
        "temperature_scale": settings.number("llama_4_scaling_beta"),
    }
    eps = reader.number("rms_norm_eps", 1e-5)
    return one_rope(reader, shared) | windows(reader, kinds, window) | temperature | {"rms_norm_eps": eps}


def _mistral3(reader: ConfigReader, shared: Fields) -> Fields:
    """The decoder is Mistral or Ministral 3."""
    kind = reader.choice("model_type", ("mistral", "ministral3"), "mistral")
    return (_ministral3 if kind == "ministral3" else _mistral)(reader, shared)


def _qwen2(reader: ConfigReader, shared: Fields) -> Fields:
    reader.refuse("attention_bias", (True,), "this architecture always has biases of query, key and value")
    return _qwen(reader, shared) | {"qkv_bias": True}


def _qwen3(reader: ConfigReader, shared: Fields) -> Fields:
    bias = reader.flag("attention_bias")
    return _qwen(reader, shared) | {"qk_norm": True, "qkv_bias": bias, "o_bias": bias}


def _qwen(reader: ConfigReader, shared: Fields) -> Fields:
    """With ``use_sliding_window`` all layers from ``max_window_layers`` on have a sliding window."""
    _no_softcaps(reader)
    window = reader.optional_count("sliding_window", 4096) if reader.flag("use_sliding_window") else None
    first = reader.get("max_window_layers", 28)
    if type(first) is not int or first < 0:
        raise reader.fail("max_window_layers", "expected an integer from 0")
    derived = [SLIDING if window is not None and i >= first else FULL for i in range(shared["num_layers"])]
    return one_rope(reader, shared) | windows(reader, layer_kinds(reader, derived), window)


def layers_without_rope(reader: ConfigReader, num_layers: int) -> frozenset[int]:
    """Layers with 0 in ``no_rope_layers``, else every ``no_rope_layer_interval``-th. Raises CheckpointError."""
    interval = reader.count("no_rope_layer_interval", 4)
    given = reader.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(num_layers)]
    if not isinstance(given, list) or len(given) < num_layers or any(value not in (0, 1) for value in given):
        raise reader.fail("no_rope_layers", f"expected 0 or 1 for each of {num_layers} layers")
    return frozenset(layer for layer in range(num_layers) if not given[layer])


def _smollm3(reader: ConfigReader, shared: Fields) -> Fields:
    """By default the layers without rotary embedding are the ones with a window."""
    num_layers, bias = shared["num_layers"], reader.flag("attention_bias")
    no_rope = layers_without_rope(reader, num_layers)
    window = reader.optional_count("sliding_window", None) if reader.flag("use_sliding_window") else None
    derived = [SLIDING if window is not None and layer in no_rope else FULL for layer in range(num_layers)]
    rope = read_rope(reader, shared["head_dim"], shared["max_positions"], 2e6)
    fields = {"rope": rope, "max_positions": rope.reach(shared["max_positions"]), "no_rope_layers": no_rope}
    biases = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": reader.flag("mlp_bias")}
    return fields | biases | windows(reader, layer_kinds(reader, derived), window)


def _olmo2(reader: ConfigReader, shared: Fields) -> Fields:
    bias, kinds = reader.flag("attention_bias"), one_kind(reader, shared, FULL)
    fields = {"qkv_bias": bias, "o_bias": bias, "rms_norm_eps": reader.number("rms_norm_eps", 1e-5)}
    return fields | one_rope(reader, shared) | windows(reader, kinds, None)


def _olmo3(reader: ConfigReader, shared: Fields) -> Fields:
    """Three of four layers have a sliding window; ``rope_scaling`` and ``rope_theta`` are the other layers'."""
    bias = reader.flag("attention_bias")
    kinds = layer_kinds(reader, [SLIDING if (i + 1) % 4 else FULL for i in range(shared["num_layers"])])
    # transformers takes rope_theta for the full layers only; published configs have its default
    full, sliding = _ropes_by_type(reader, shared, ("rope_theta", 5e5), ("", 5e5))
    ropes = {"rope": full, "local_rope": sliding, "max_positions": full.reach(shared["max_positions"])}
    fields = {"qkv_bias": bias, "o_bias": bias, "rms_norm_eps": reader.number("rms_norm_eps", 1e-5)}
    return fields | ropes | windows(reader, kinds, reader.optional_count("sliding_window", 4096))


def _phi3(reader: ConfigReader, shared: Fields) -> Fields:
    window = reader.optional_count("sliding_window", None)
    kinds = one_kind(reader, shared, FULL if window is None else SLIDING)
    rope = read_phi3_rope(reader, shared["head_dim"], shared["max_positions"])
    fields = {"rope": rope, "rms_norm_eps": reader.number("rms_norm_eps", 1e-5)}
    return fields | windows(reader, kinds, window)


def _glm4(reader: ConfigReader, shared: Fields) -> Fields:
    kinds = one_kind(reader, shared, FULL)
    rope = partial_rope(reader, shared["head_dim"], shared["max_positions"], 0.5)
    fields = {"rope": rope, "max_positions": rope.reach(shared["max_positions"])}
    eps = reader.number("rms_norm_eps", 1.5625e-7)
    return (
        fields | windows(reader, kinds, None) | {"qkv_bias": reader.flag("attention_bias", True), "rms_norm_eps": eps}
    )


def _cohere(reader: ConfigReader, shared: Fields) -> Fields:
    reader.refuse("use_qk_norm", (False,), "norms of queries and keys are not supported in this architecture")
    return _parallel(reader, shared) | windows(reader, one_kind(reader, shared, FULL), None)


def _cohere2(reader: ConfigReader, shared: Fields) -> Fields:
    """Layers with full attention have no rotary embedding."""
    pattern = reader.count("sliding_window_pattern", 4)
    kinds = layer_kinds(reader, [SLIDING if (i + 1) % pattern else FULL for i in range(shared["num_layers"])])
    no_rope = frozenset(layer for layer, kind in enumerate(kinds) if kind == FULL)
    window = reader.optional_count("sliding_window", 4096)
    return _parallel(reader, shared) | windows(reader, kinds, window) | {"no_rope_layers": no_rope}


def _parallel(reader: ConfigReader, shared: Fields) -> Fields:
    bias = reader.flag("attention_bias")
    constants = {"logits_divisor": 1 / reader.number("logit_scale", 0.0625)}
    eps = reader.number("layer_norm_eps", 1e-5)
    return one_rope(reader, shared) | constants | {"rms_norm_eps": eps, "qkv_bias": bias, "o_bias": bias}


def _falcon_h1(reader: ConfigReader, shared: Fields) -> Fields:
    """Every layer has attention and Mamba-2."""
    reader.refuse("hidden_act", ("silu",), "the convolution of Falcon-H1 is followed by silu")
    bias = reader.flag("attention_bias")
    gate, down = multipliers(reader, "mlp_multipliers", 2)
    return one_rope(reader, shared) | {
        "layer_types": (HYBRID,) * shared["num_layers"],
        "mamba": falcon_h1_mamba(reader, shared["hidden_size"]),
        "embedding_multiplier": reader.number("embedding_multiplier", 1.0),
        "logits_divisor": 1 / reader.number("lm_head_multiplier", 1.0),
        "key_multiplier": reader.number("key_multiplier", 1.0),
        "attention_in_multiplier": reader.number("attention_in_multiplier", 1.0),
        "attention_out_multiplier": reader.number("attention_out_multiplier", 1.0),
        "mlp_multipliers": (gate, down),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": reader.flag("mlp_bias"),
        "rms_norm_eps": reader.number("rms_norm_eps", 1e-5),
    }


def unrotated(shared: Fields) -> Fields:
    """No rotary embedding in any layer."""
    return {"rope": Rope(), "no_rope_layers": frozenset(range(shared["num_layers"]))}


def _mamba2_names(reader: ConfigReader) -> ConfigReader:
    """Heads, features and norms under the names of attention; the number of positions is unlimited."""
    names = {
        "num_attention_heads": reader.count("num_heads", 128),
        "num_key_value_heads": None,
        "head_dim": reader.count("head_dim", 64),
        "intermediate_size": int(reader.number("expand", 2) * reader.count("hidden_size")),
        "rms_norm_eps": reader.number("layer_norm_epsilon", 1e-5),
    }
    return ConfigReader(reader.path, reader.values | names)


def _mamba2(reader: ConfigReader, shared: Fields) -> Fields:
    """Every layer has a recurrent state, none caches keys."""
    reader.refuse("hidden_act", ("silu",), "the convolution of Mamba-2 is followed by silu")
    return unrotated(shared) | {
        "layer_types": (LINEAR,) * shared["num_layers"],
        "mamba": mamba2_mamba(reader, shared["hidden_size"]),
        "residual_in_fp32": reader.flag("residual_in_fp32", default=True),
    }


def _bamba(reader: ConfigReader, shared: Fields) -> Fields:
    """Layers of ``attn_layer_indices`` have attention, with half of each head rotated, the others Mamba-2."""
    reader.refuse("hidden_act", ("silu",), "the convolution of Bamba is followed by silu")
    num_layers, attention = shared["num_layers"], reader.get("attn_layer_indices", [])
    if not isinstance(attention, list) or any(type(i) is not int or not 0 <= i < num_layers for i in attention):
        raise reader.fail("attn_layer_indices", f"expected a list of layer numbers below {num_layers}")
    rope = partial_rope(reader, shared["head_dim"], shared["max_positions"], 0.5)
    bias = reader.flag("attention_bias")
    return {
        "rope": rope,
        "max_positions": rope.reach(shared["max_positions"]),
        "layer_types": tuple(FULL if i in attention else LINEAR for i in range(num_layers)),
        "mamba": bamba_mamba(reader, shared["hidden_size"]),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": reader.flag("mlp_bias"),
        "rms_norm_eps": reader.number("rms_norm_eps", 1e-5),
    }


def _zamba2_names(reader: ConfigReader) -> ConfigReader:
    """Heads are twice as wide as hidden states have room for."""
    hidden_size = reader.count("hidden_size")
    sizes = {"intermediate_size": 4 * hidden_size, "rms_norm_eps": 1e-5}
    head_dim = 2 * hidden_size // reader.count("num_attention_heads")
    reader.refuse("attention_head_dim", (head_dim,), f"2 * hidden_size / num_attention_heads is {head_dim}")
    return ConfigReader(reader.path, reader.values | {"head_dim": head_dim}).with_defaults(sizes)


def _zamba2(reader: ConfigReader, shared: Fields) -> Fields:
    """Every layer has Mamba-2, layers of ``hybrid`` also a block of attention that they share."""
    reader.refuse("use_long_context", (False,), "the extended rotary embedding of Zamba2 is not supported")
    reader.refuse("sliding_window", (), "the attention of Zamba2 has no window")
    num_layers, bias = shared["num_layers"], reader.flag("add_bias_linear")
    kinds = reader.get(
        "layers_block_type",
        [LINEAR, *([LINEAR] * 5 + [HYBRID]) * 7, *[LINEAR] * 4, HYBRID, *[LINEAR] * 3, HYBRID, *[LINEAR] * 2],
    )
    known = {LINEAR: LINEAR, "mamba": LINEAR, HYBRID: HYBRID}
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= set(known):
        raise reader.fail("layers_block_type", f"expected {LINEAR} or {HYBRID} for each of {num_layers} layers")
    kinds = tuple(known[kind] for kind in kinds)
    rotation = one_rope(reader, shared) if reader.flag("use_mem_rope") else unrotated(shared)
    return rotation | {
        "layer_types": kinds,
        "mamba": zamba2_mamba(reader, shared["hidden_size"]),
        "shared_blocks": zamba2_blocks(reader, kinds),
        "attention_scale": (shared["head_dim"] / 2) ** -0.5,
        "mlp_bias": bias,
    }


def _lfm2(reader: ConfigReader, shared: Fields) -> Fields:
    """Layers of ``conv`` have a short convolution; MLPs are narrower if ``block_auto_adjust_ff_dim``."""
    num_layers, conv = shared["num_layers"], "conv"
    attention = reader.get("full_attn_idxs", list(range(num_layers)))
    if not isinstance(attention, list):
        raise reader.fail("full_attn_idxs", "expected a list of layer numbers")
    kinds = layer_kinds(reader, [FULL if i in attention else conv for i in range(num_layers)], conv)
    if FULL not in kinds:
        raise reader.fail("layer_types", f"{FULL} is needed at least once")
    kernel, size = reader.count("conv_L_cache", 3), reader.count("block_ff_dim", shared["intermediate_size"])
    if kernel < 2:
        raise reader.fail("conv_L_cache", "expected an integer above 1")
    if reader.flag("block_auto_adjust_ff_dim", default=True):
        multiple = reader.count("block_multiple_of", 256)
        size = int(reader.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
        size = -(-size // multiple) * multiple
    return one_rope(reader, shared, 1e6) | {
        "layer_types": tuple(LINEAR if kind == conv else kind for kind in kinds),
        "intermediate_size": size,
        "short_conv": kernel,
        "short_conv_bias": reader.flag("conv_bias"),
        "qk_norm": True,
        "rms_norm_eps": reader.number("norm_eps", 1e-5),
        "tie_word_embeddings": reader.flag("tie_embedding", shared["tie_word_embeddings"]),
    }


def _starcoder2(reader: ConfigReader, shared: Fields) -> Fields:
    bias, window = reader.flag("use_bias", default=True), reader.optional_count("sliding_window", None)
    kinds = one_kind(reader, shared, FULL if window is None else SLIDING)
    biases = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bias}
    eps = reader.number("norm_epsilon", 1e-5)
    return one_rope(reader, shared) | biases | windows(reader, kinds, window) | {"rms_norm_eps": eps}


def _granite(reader: ConfigReader, shared: Fields) -> Fields:
    multipliers = {
        "embedding_multiplier": reader.number("embedding_multiplier", 1.0),
        "residual_multiplier": reader.number("residual_multiplier", 1.0),
        "attention_scale": reader.number("attention_multiplier", 1.0),
        "logits_divisor": reader.number("logits_scaling", 1.0),
    }
    return _llama(reader, shared) | multipliers


def _gemma2(reader: ConfigReader, shared: Fields) -> Fields:
    softcap = reader.optional_number("attn_logit_softcapping", 50.0)
    fields = _gemma(reader, shared, pattern=2, final=30.0) | {"attention_softcap": softcap}
    return fields | one_rope(reader, shared)


def _gemma3(reader: ConfigReader, shared: Fields) -> Fields:
    reader.refuse("attn_logit_softcapping", (), "transformers does not apply it in this architecture; remove the key")
    pattern = reader.count("sliding_window_pattern", 6)
    fields = _gemma(reader, shared, pattern=pattern, final=None) | {"qk_norm": True}
    full, sliding = _ropes_by_type(reader, shared, ("rope_theta", 1e6), ("rope_local_base_freq", 1e4))
    return fields | {"rope": full, "local_rope": sliding, "max_positions": full.reach(shared["max_positions"])}


def _gemma3n_names(reader: ConfigReader) -> ConfigReader:
    """``intermediate_size`` is one for all layers, or one for each."""
    given, num_layers = reader.get("intermediate_size", 16384), reader.count("num_hidden_layers", 35)
    sizes = given if isinstance(given, list) else [given] * num_layers
    if len(sizes) != num_layers or any(type(size) is not int or size < 1 for size in sizes):
        raise reader.fail("intermediate_size", f"expected an integer above 0, or one for each of {num_layers} layers")
    return ConfigReader(reader.path, reader.values | {"intermediate_size": max(sizes), "intermediate_sizes": sizes})


def _gemma3n(reader: ConfigReader, shared: Fields) -> Fields:
    """The last layers read the keys of earlier ones."""
    fields = _gemma(reader, shared, pattern=5, final=30.0) | {"qk_norm": True, "attention_scale": 1.0}
    if "sliding_window" not in reader.values and SLIDING in fields["layer_types"]:
        fields["sliding_window"] = 512
    full, sliding = _ropes_by_type(reader, shared, ("rope_theta", 1e6), ("rope_local_base_freq", 1e4))
    return fields | {
        "rope": full,
        "local_rope": sliding,
        "max_positions": full.reach(shared["max_positions"]),
        "gemma3n": gemma3n_parts(reader, shared["num_layers"]),
        "layer_inputs": gemma3n_layer_inputs(reader),
        "shared_kv_layers": shared_kv_layers(reader, fields["layer_types"], default=15),
    }


def _gemma(reader: ConfigReader, shared: Fields, pattern: int, final: float | None) -> Fields:
    """Every ``pattern``-th layer has full attention, the others a sliding window."""
    derived = [SLIDING if (i + 1) % pattern else FULL for i in range(shared["num_layers"])]
    bias = reader.flag("attention_bias")
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "attention_scale": reader.number("query_pre_attn_scalar", 256) ** -0.5,
        "final_softcap": reader.optional_number("final_logit_softcapping", final),
        "embedding_scale": shared["hidden_size"] ** 0.5,
    } | windows(reader, layer_kinds(reader, derived), reader.optional_count("sliding_window", 4096))


def _ropes_by_type(
    reader: ConfigReader, shared: Fields, full: tuple[str, float], sliding: tuple[str, float]
) -> tuple[Rope, Rope]:
    """Rope of the global and of the sliding layers; before transformers 5 ``rope_scaling`` was the global layers'."""
    given = reader.section("rope_parameters")
    if given is not None and not set(given.values) <= {FULL, SLIDING}:
        raise reader.fail("rope_parameters", f"it must hold settings for {FULL} and {SLIDING}, nothing else")
    both = given or ConfigReader(reader.path, {})
    scaling = reader.section("rope_scaling") or ConfigReader(reader.path, {})
    ropes = []
    for kind, (key, default) in ((FULL, full), (SLIDING, sliding)):
        settings = both.section(kind) or ConfigReader(reader.path, {})
        if kind == FULL:
            settings = ConfigReader(reader.path, settings.values | scaling.values)
        theta = reader.number(key, default)
        ropes.append(rope_of(settings, shared["head_dim"], shared["max_positions"], theta))
    return ropes[0], ropes[1]


_GEMMA: Fields = {
    "head_dim": 256,
    "num_kv_heads": 4,
    "tied": True,
    "activation_key": "hidden_activation",
    "activation": "gelu_pytorch_tanh",
}

_GEMMA3N: Fields = _GEMMA | {"num_kv_heads": 2}

DENSE = {
    "LlamaForCausalLM": Family(model_type="llama", read=_llama),
    "MistralForCausalLM": Family(model_type="mistral", read=_mistral, num_kv_heads=8, max_positions=131072),
    "Ministral3ForCausalLM": Family(
        model_type="ministral3", read=_ministral3, head_dim=128, num_kv_heads=8, max_positions=262144
    ),
    "Qwen2ForCausalLM": Family(model_type="qwen2", read=_qwen2, num_kv_heads=32, max_positions=32768),
    "Qwen3ForCausalLM": Family(model_type="qwen3", read=_qwen3, head_dim=128, num_kv_heads=32, max_positions=32768),
    "SmolLM3ForCausalLM": Family(model_type="smollm3", read=_smollm3, num_kv_heads=4, max_positions=32768, tied=True),
    "GraniteForCausalLM": Family(model_type="granite", read=_granite),
    "Phi3ForCausalLM": Family(model_type="phi3", read=_phi3, max_positions=4096),
    "GlmForCausalLM": Family(model_type="glm", read=_glm4, head_dim=128, num_kv_heads=2, max_positions=131072),
    "Glm4ForCausalLM": Family(model_type="glm4", read=_glm4, head_dim=128, num_kv_heads=2, max_positions=131072),
    "CohereForCausalLM": Family(model_type="cohere", read=_cohere, max_positions=8192, tied=True),
    "Cohere2ForCausalLM": Family(model_type="cohere2", read=_cohere2, max_positions=8192, tied=True),
    "Starcoder2ForCausalLM": Family(
        model_type="starcoder2",
        read=_starcoder2,
        num_kv_heads=2,
        max_positions=4096,
        tied=True,
        activation="gelu_pytorch_tanh",
    ),
    "FalconH1ForCausalLM": Family(model_type="falcon_h1", read=_falcon_h1, num_kv_heads=8, max_positions=8192),
    "Mamba2ForCausalLM": Family(model_type="mamba2", prepare=_mamba2_names, read=_mamba2, max_positions=262144),
    "BambaForCausalLM": Family(model_type="bamba", read=_bamba, num_kv_heads=8, max_positions=262144),
    "Zamba2ForCausalLM": Family(
        model_type="zamba2", prepare=_zamba2_names, read=_zamba2, max_positions=4096, tied=True, activation="gelu"
    ),
    "Lfm2ForCausalLM": Family(model_type="lfm2", read=_lfm2, num_kv_heads=8, max_positions=128000, tied=True),
    "Olmo2ForCausalLM": Family(model_type="olmo2", read=_olmo2),
    "Olmo3ForCausalLM": Family(model_type="olmo3", read=_olmo3),
    "Gemma2ForCausalLM": Family(model_type="gemma2", read=_gemma2, max_positions=8192, **_GEMMA),
    "Gemma3ForCausalLM": Family(model_type="gemma3_text", read=_gemma3, max_positions=131072, **_GEMMA),
    "Gemma3ForConditionalGeneration": Family(
        model_type="gemma3",
        read=_gemma3,
        max_positions=131072,
        is_multimodal=True,
        text_defaults={
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
        },
        **_GEMMA,
    ),
    "Gemma3nForCausalLM": Family(
        model_type="gemma3n_text", prepare=_gemma3n_names, read=_gemma3n, max_positions=32768, **_GEMMA3N
    ),
    "Gemma3nForConditionalGeneration": Family(
        model_type="gemma3n",
        prepare=_gemma3n_names,
        read=_gemma3n,
        max_positions=32768,
        is_multimodal=True,
        text_defaults={
            "vocab_size": 262400,
            "hidden_size": 2048,
            "num_hidden_layers": 35,
            "num_attention_heads": 8,
        },
        **_GEMMA3N,
    ),
    "Mistral3ForConditionalGeneration": Family(
        model_type="mistral3", read=_mistral3, num_kv_heads=8, max_positions=131072, is_multimodal=True
    ),
}
"""Architecture name of config.json -> family."""
