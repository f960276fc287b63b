"""Config families without experts, with the defaults of their transformers config classes."""

from tapscope.engine.hf_config.config_reader import ConfigReader
from tapscope.engine.hf_config.family import (
    FULL,
    HYBRID,
    LINEAR,
    SLIDING,
    Family,
    Fields,
    attention_bias,
    layer_kinds,
    layers_without_rope,
    one_rope,
    one_window,
    rope_fields,
    unrotated,
    windows,
)
from tapscope.engine.hf_config.gemma3n_config import gemma3n_layer_inputs, gemma3n_parts, shared_kv_layers
from tapscope.engine.hf_config.mamba_config import bamba_mamba, falcon_h1_mamba, mamba2_mamba, multipliers, zamba2_mamba
from tapscope.engine.hf_config.rope_config import Rope, partial_rope, read_phi3_rope, rope_of
from tapscope.engine.hf_config.zamba2_config import zamba2_blocks


def _no_softcaps(reader: ConfigReader) -> None:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        reader.refuse(name, (), "this architecture has no soft-cap; remove the key")


def _llama(reader: ConfigReader, shared: Fields) -> Fields:
    _no_softcaps(reader)
    biases = attention_bias(reader) | {"mlp_bias": reader.flag("mlp_bias")}
    return one_rope(reader, shared) | biases | one_window(reader, shared, None)


def _mistral(reader: ConfigReader, shared: Fields) -> Fields:
    _no_softcaps(reader)
    reader.refuse("attention_bias", (False,), "this architecture has no biases")
    window = reader.optional_count("sliding_window", 4096)
    return one_rope(reader, shared) | one_window(reader, shared, window)


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
    """Read Ministral 3: Mistral with queries scaled by position."""
    name = "rope_scaling" if reader.get("rope_scaling") else "rope_parameters"
    if not reader.get(name):
        reader = ConfigReader(reader.path, reader.values | {name: _MINISTRAL3_ROPE})
    window = reader.optional_count("sliding_window", None)
    settings = reader.section(name) or reader
    temperature = {
        "temperature_floor": settings.count("original_max_position_embeddings"),
        "temperature_scale": settings.number("llama_4_scaling_beta"),
    }
    eps = reader.number("rms_norm_eps", 1e-5)
    return one_rope(reader, shared) | one_window(reader, shared, window) | temperature | {"rms_norm_eps": eps}


def _mistral3(reader: ConfigReader, shared: Fields) -> Fields:
    """Read Mistral 3, whose decoder is Mistral or Ministral 3."""
    kind = reader.choice("model_type", ("mistral", "ministral3"), "mistral")
    return (_ministral3 if kind == "ministral3" else _mistral)(reader, shared)


def _qwen2(reader: ConfigReader, shared: Fields) -> Fields:
    reader.refuse("attention_bias", (True,), "this architecture always has biases of query, key and value")
    return _qwen(reader, shared) | {"qkv_bias": True}


def _qwen3(reader: ConfigReader, shared: Fields) -> Fields:
    return _qwen(reader, shared) | attention_bias(reader) | {"qk_norm": True}


def _qwen(reader: ConfigReader, shared: Fields) -> Fields:
    """Read Qwen: with ``use_sliding_window``, layers from ``max_window_layers`` on have a sliding window."""
    _no_softcaps(reader)
    window = reader.optional_count("sliding_window", 4096) if reader.flag("use_sliding_window") else None
    first = reader.count("max_window_layers", 28, minimum=0)
    derived = [SLIDING if window is not None and i >= first else FULL for i in range(shared["num_layers"])]
    return one_rope(reader, shared) | windows(reader, layer_kinds(reader, derived), window)


def _smollm3(reader: ConfigReader, shared: Fields) -> Fields:
    """Read SmolLM3: by default, layers without rotary embedding have the sliding window."""
    num_layers = shared["num_layers"]
    no_rope = layers_without_rope(reader, num_layers)
    window = reader.optional_count("sliding_window", None) if reader.flag("use_sliding_window") else None
    derived = [SLIDING if window is not None and layer in no_rope else FULL for layer in range(num_layers)]
    biases = attention_bias(reader) | {"mlp_bias": reader.flag("mlp_bias")}
    fields = one_rope(reader, shared, 2e6) | {"no_rope_layers": no_rope}
    return fields | biases | windows(reader, layer_kinds(reader, derived), window)


def _olmo2(reader: ConfigReader, shared: Fields) -> Fields:
    return attention_bias(reader) | one_rope(reader, shared) | one_window(reader, shared, None)


def _olmo3(reader: ConfigReader, shared: Fields) -> Fields:
    """Read Olmo 3: three of four layers have a sliding window; ``rope_scaling`` applies to the other layers only."""
    kinds = layer_kinds(reader, [SLIDING if (i + 1) % 4 else FULL for i in range(shared["num_layers"])])
    # transformers applies rope_theta to the full-attention layers only; published configs have the default value
    full, sliding = _ropes_by_type(reader, shared, ("rope_theta", 5e5), ("", 5e5))
    fields = attention_bias(reader) | rope_fields(full, shared) | {"local_rope": sliding}
    return fields | windows(reader, kinds, reader.optional_count("sliding_window", 4096))


def _phi3(reader: ConfigReader, shared: Fields) -> Fields:
    rope = read_phi3_rope(reader, shared["head_dim"], shared["max_positions"])
    return {"rope": rope} | one_window(reader, shared, reader.optional_count("sliding_window", None))


def _glm4(reader: ConfigReader, shared: Fields) -> Fields:
    rope = partial_rope(reader, shared["head_dim"], shared["max_positions"], 0.5)
    fields = rope_fields(rope, shared) | one_window(reader, shared, None)
    return fields | {"qkv_bias": reader.flag("attention_bias", default=True)}


def _cohere(reader: ConfigReader, shared: Fields) -> Fields:
    reader.refuse("use_qk_norm", (False,), "norms of queries and keys are not supported in this architecture")
    return one_rope(reader, shared, 5e5) | _parallel(reader) | one_window(reader, shared, None)


def _cohere2(reader: ConfigReader, shared: Fields) -> Fields:
    """Read Cohere 2: layers with full attention have no rotary embedding."""
    pattern = reader.count("sliding_window_pattern", 4)
    kinds = layer_kinds(reader, [SLIDING if (i + 1) % pattern else FULL for i in range(shared["num_layers"])])
    no_rope = frozenset(layer for layer, kind in enumerate(kinds) if kind == FULL)
    window = reader.optional_count("sliding_window", 4096)
    fields = one_rope(reader, shared) | _parallel(reader)
    return fields | windows(reader, kinds, window) | {"no_rope_layers": no_rope}


def _parallel(reader: ConfigReader) -> Fields:
    """Read the constants of Cohere's decoder layers, in which attention and MLP read the same input."""
    constants = {
        "logits_divisor": 1 / reader.number("logit_scale", 0.0625),
        "rms_norm_eps": reader.number("layer_norm_eps", 1e-5),
    }
    return attention_bias(reader) | constants


def _falcon_h1(reader: ConfigReader, shared: Fields) -> Fields:
    """Read Falcon-H1: every layer has attention and Mamba-2."""
    reader.refuse("hidden_act", ("silu",), "the convolution of Falcon-H1 is followed by silu")
    gate, down = multipliers(reader, "mlp_multipliers", 2)
    return (one_rope(reader, shared) | attention_bias(reader)) | {
        "layer_types": (HYBRID,) * shared["num_layers"],
        "mamba": falcon_h1_mamba(reader, shared["hidden_size"]),
        "embedding_multiplier": reader.number("embedding_multiplier", 1.0),
        "logits_divisor": 1 / reader.number("lm_head_multiplier", 1.0),
        "key_multiplier": reader.number("key_multiplier", 1.0),
        "attention_in_multiplier": reader.number("attention_in_multiplier", 1.0),
        "attention_out_multiplier": reader.number("attention_out_multiplier", 1.0),
        "mlp_multipliers": (gate, down),
        "mlp_bias": reader.flag("mlp_bias"),
    }


def _mamba2_names(reader: ConfigReader) -> ConfigReader:
    """Map the sizes of Mamba-2 to the keys of attention models; the number of positions is unlimited."""
    names = {
        "num_attention_heads": reader.count("num_heads", 128),
        "num_key_value_heads": None,
        "head_dim": reader.count("head_dim", 64),
        "intermediate_size": int(reader.number("expand", 2) * reader.count("hidden_size")),
        "rms_norm_eps": reader.number("layer_norm_epsilon", 1e-5),
    }
    return ConfigReader(reader.path, reader.values | names)


def _mamba2(reader: ConfigReader, shared: Fields) -> Fields:
    """Read Mamba-2: every layer has a recurrent state, and no layer has a KV cache."""
    reader.refuse("hidden_act", ("silu",), "the convolution of Mamba-2 is followed by silu")
    return unrotated(shared) | {
        "layer_types": (LINEAR,) * shared["num_layers"],
        "mamba": mamba2_mamba(reader, shared["hidden_size"]),
        "residual_in_fp32": reader.flag("residual_in_fp32", default=True),
    }


def _bamba(reader: ConfigReader, shared: Fields) -> Fields:
    """Read Bamba: layers in ``attn_layer_indices`` have attention with half of each head rotated, others Mamba-2."""
    reader.refuse("hidden_act", ("silu",), "the convolution of Bamba is followed by silu")
    num_layers, attention = shared["num_layers"], reader.get("attn_layer_indices", [])
    if not isinstance(attention, list) or any(type(i) is not int or not 0 <= i < num_layers for i in attention):
        raise reader.fail("attn_layer_indices", f"expected a list of layer numbers below {num_layers}")
    rope = partial_rope(reader, shared["head_dim"], shared["max_positions"], 0.5)
    return (rope_fields(rope, shared) | attention_bias(reader)) | {
        "layer_types": tuple(FULL if i in attention else LINEAR for i in range(num_layers)),
        "mamba": bamba_mamba(reader, shared["hidden_size"]),
        "mlp_bias": reader.flag("mlp_bias"),
    }


def _zamba2_names(reader: ConfigReader) -> ConfigReader:
    """Derive the head size: Zamba2's attention heads together are twice as wide as the hidden states."""
    hidden_size = reader.count("hidden_size")
    head_dim = 2 * hidden_size // reader.count("num_attention_heads")
    reader.refuse("attention_head_dim", (head_dim,), f"2 * hidden_size / num_attention_heads is {head_dim}")
    inner = ConfigReader(reader.path, reader.values | {"head_dim": head_dim})
    return inner.with_defaults({"intermediate_size": 4 * hidden_size})


def _zamba2(reader: ConfigReader, shared: Fields) -> Fields:
    """Read Zamba2: every layer has Mamba-2, and ``hybrid`` layers also have a shared attention block."""
    reader.refuse("use_long_context", (False,), "the extended rotary embedding of Zamba2 is not supported")
    reader.refuse("sliding_window", (), "the attention of Zamba2 has no window")
    num_layers = shared["num_layers"]
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
        "mlp_bias": reader.flag("add_bias_linear"),
    }


def _lfm2(reader: ConfigReader, shared: Fields) -> Fields:
    """Read LFM2: ``conv`` layers have a short convolution; ``block_auto_adjust_ff_dim`` reduces the MLP size."""
    num_layers, conv = shared["num_layers"], "conv"
    attention = reader.get("full_attn_idxs", list(range(num_layers)))
    if not isinstance(attention, list):
        raise reader.fail("full_attn_idxs", "expected a list of layer numbers")
    kinds = layer_kinds(reader, [FULL if i in attention else conv for i in range(num_layers)], conv)
    if FULL not in kinds:
        raise reader.fail("layer_types", f"{FULL} is needed at least once")
    size = reader.count("block_ff_dim", shared["intermediate_size"])
    if reader.flag("block_auto_adjust_ff_dim", default=True):
        multiple = reader.count("block_multiple_of", 256)
        size = int(reader.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
        size = -(-size // multiple) * multiple
    return one_rope(reader, shared, 1e6) | {
        "layer_types": tuple(LINEAR if kind == conv else kind for kind in kinds),
        "intermediate_size": size,
        "short_conv": reader.count("conv_L_cache", 3, minimum=2),
        "short_conv_bias": reader.flag("conv_bias"),
        "qk_norm": True,
        "rms_norm_eps": reader.number("norm_eps", 1e-5),
        "tie_word_embeddings": reader.flag("tie_embedding", shared["tie_word_embeddings"]),
    }


def _starcoder2(reader: ConfigReader, shared: Fields) -> Fields:
    bias, window = reader.flag("use_bias", default=True), reader.optional_count("sliding_window", None)
    biases = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bias}
    eps = reader.number("norm_epsilon", 1e-5)
    return one_rope(reader, shared) | biases | one_window(reader, shared, window) | {"rms_norm_eps": eps}


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
    return fields | rope_fields(full, shared) | {"local_rope": sliding}


def _gemma3n_names(reader: ConfigReader) -> ConfigReader:
    """Expand ``intermediate_size``, which is one integer or one per layer, to ``intermediate_sizes``."""
    given, num_layers = reader.get("intermediate_size", 16384), reader.count("num_hidden_layers", 35)
    sizes = given if isinstance(given, list) else [given] * num_layers
    if len(sizes) != num_layers or any(type(size) is not int or size < 1 for size in sizes):
        raise reader.fail("intermediate_size", f"expected an integer above 0, or one for each of {num_layers} layers")
    return ConfigReader(reader.path, reader.values | {"intermediate_size": max(sizes), "intermediate_sizes": sizes})


def _gemma3n(reader: ConfigReader, shared: Fields) -> Fields:
    """Read Gemma 3n: the last layers read the keys and values of earlier layers."""
    fields = _gemma(reader, shared, pattern=5, final=30.0) | {"qk_norm": True, "attention_scale": 1.0}
    if "sliding_window" not in reader.values and SLIDING in fields["layer_types"]:
        fields["sliding_window"] = 512
    full, sliding = _ropes_by_type(reader, shared, ("rope_theta", 1e6), ("rope_local_base_freq", 1e4))
    return (fields | rope_fields(full, shared)) | {
        "local_rope": sliding,
        "gemma3n": gemma3n_parts(reader, shared["num_layers"]),
        "layer_inputs": gemma3n_layer_inputs(reader),
        "shared_kv_layers": shared_kv_layers(reader, fields["layer_types"], default=15),
    }


def _gemma(reader: ConfigReader, shared: Fields, pattern: int, final: float | None) -> Fields:
    """Read the common fields of Gemma: every ``pattern``-th layer has full attention, others a sliding window."""
    derived = [SLIDING if (i + 1) % pattern else FULL for i in range(shared["num_layers"])]
    window = reader.optional_count("sliding_window", 4096)
    return (attention_bias(reader) | windows(reader, layer_kinds(reader, derived), window)) | {
        "attention_scale": reader.number("query_pre_attn_scalar", 256) ** -0.5,
        "final_softcap": reader.optional_number("final_logit_softcapping", final),
        "embedding_scale": shared["hidden_size"] ** 0.5,
    }


def _ropes_by_type(
    reader: ConfigReader, shared: Fields, full: tuple[str, float], sliding: tuple[str, float]
) -> tuple[Rope, Rope]:
    """Read the RoPE settings of full-attention and sliding layers.

    Before transformers 5, ``rope_scaling`` contained the settings of the full-attention layers.
    """
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


_GLM4: Fields = {"head_dim": 128, "num_kv_heads": 2, "max_positions": 131072, "rms_norm_eps": 1.5625e-7}

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
    "Phi3ForCausalLM": Family(model_type="phi3", read=_phi3, max_positions=4096, rms_norm_eps=1e-5),
    "GlmForCausalLM": Family(model_type="glm", read=_glm4, **_GLM4),
    "Glm4ForCausalLM": Family(model_type="glm4", read=_glm4, **_GLM4),
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
    "FalconH1ForCausalLM": Family(
        model_type="falcon_h1", read=_falcon_h1, num_kv_heads=8, max_positions=8192, rms_norm_eps=1e-5
    ),
    "Mamba2ForCausalLM": Family(model_type="mamba2", prepare=_mamba2_names, read=_mamba2, max_positions=262144),
    "BambaForCausalLM": Family(
        model_type="bamba", read=_bamba, num_kv_heads=8, max_positions=262144, rms_norm_eps=1e-5
    ),
    "Zamba2ForCausalLM": Family(
        model_type="zamba2",
        prepare=_zamba2_names,
        read=_zamba2,
        max_positions=4096,
        rms_norm_eps=1e-5,
        tied=True,
        activation="gelu",
    ),
    "Lfm2ForCausalLM": Family(model_type="lfm2", read=_lfm2, num_kv_heads=8, max_positions=128000, tied=True),
    "Olmo2ForCausalLM": Family(model_type="olmo2", read=_olmo2, rms_norm_eps=1e-5),
    "Olmo3ForCausalLM": Family(model_type="olmo3", read=_olmo3, rms_norm_eps=1e-5),
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
