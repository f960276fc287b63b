"""Config families with experts, with the defaults of their transformers config classes."""

from tapscope.engine.hf_config.config_reader import ConfigReader
from tapscope.engine.hf_config.family import (
    ACTIVATIONS,
    CHUNKED,
    EXPERTS,
    FULL,
    LINEAR,
    MLP,
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
from tapscope.engine.hf_config.linear_config import kimi_linear_attention, qwen3_next_linear
from tapscope.engine.hf_config.mamba_config import jamba_mamba, nemotron_h_mamba
from tapscope.engine.hf_config.mla_config import deepseek_attention, indexer
from tapscope.engine.hf_config.moe_config import (
    deepseek_v2_experts,
    deepseek_v3_experts,
    glm4_experts,
    gpt_oss_experts,
    jamba_experts,
    kimi_linear_experts,
    llama4_experts,
    minimax_m2_experts,
    mixtral_experts,
    nemotron_h_experts,
    olmoe_experts,
    periodic,
    qwen2_experts,
    qwen3_5_experts,
    qwen3_experts,
    qwen3_next_experts,
    sparse_attention_experts,
)
from tapscope.engine.hf_config.rope_config import partial_rope


def _mixtral(reader: ConfigReader, shared: Fields) -> Fields:
    reader.refuse("attention_bias", (False,), "this architecture has no biases")
    window = reader.optional_count("sliding_window", None)
    fields = one_rope(reader, shared, 1e6) | one_window(reader, shared, window)
    return fields | {"moe": mixtral_experts(reader)}


def _qwen2_moe(reader: ConfigReader, shared: Fields) -> Fields:
    """Read Qwen2-MoE.

    As in transformers, ``use_sliding_window`` gives every second layer below ``max_window_layers`` a window.
    """
    num_layers, first = shared["num_layers"], reader.count("max_window_layers", 28, minimum=0)
    window = reader.optional_count("sliding_window", 4096) if reader.flag("use_sliding_window") else None
    slides = (window is not None and (i + 1) % 2 == 1 and i < first for i in range(num_layers))
    kinds = layer_kinds(reader, [SLIDING if each else FULL for each in slides])
    fields = one_rope(reader, shared) | windows(reader, kinds, window)
    return fields | {"moe": qwen2_experts(reader, num_layers), "qkv_bias": reader.flag("qkv_bias", default=True)}


def _qwen3_moe(reader: ConfigReader, shared: Fields) -> Fields:
    """Read Qwen3-MoE: all layers have a sliding window or full attention.

    As in transformers, ``max_window_layers`` is ignored.
    """
    window = reader.optional_count("sliding_window", 4096) if reader.flag("use_sliding_window") else None
    fields = one_rope(reader, shared) | one_window(reader, shared, window) | attention_bias(reader)
    return fields | {"moe": qwen3_experts(reader, shared["num_layers"]), "qk_norm": True}


def _qwen3_next(reader: ConfigReader, shared: Fields) -> Fields:
    return _hybrid_qwen(reader, shared) | {"moe": qwen3_next_experts(reader, shared["num_layers"])}


def _qwen3_5(reader: ConfigReader, shared: Fields) -> Fields:
    """Read Qwen3.5, whose mRoPE is ordinary RoPE for text: positions of text are equal on all axes."""
    sections = {"mrope_section", "mrope_interleaved"}
    values = dict(reader.values)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(name), dict):
            rope = {key: value for key, value in values[name].items() if key not in sections}
            kind = "rope_type" if "rope_type" in rope else "type"
            values[name] = rope | ({kind: "default"} if rope.get(kind) == "mrope" else {})
    return _hybrid_qwen(ConfigReader(reader.path, values), shared)


def _qwen3_5_moe(reader: ConfigReader, shared: Fields) -> Fields:
    reader.refuse("norm_topk_prob", (True,), "Qwen3.5 normalizes the experts' weights")
    return _qwen3_5(reader, shared) | {"moe": qwen3_5_experts(reader, shared["num_layers"])}


def _hybrid_qwen(reader: ConfigReader, shared: Fields) -> Fields:
    """Read a hybrid Qwen: every ``full_attention_interval``-th layer has full attention, others linear attention."""
    reader.refuse("hidden_act", ("silu",), "the convolution of the linear attention is followed by silu")
    num_layers, interval = shared["num_layers"], reader.count("full_attention_interval", 4)
    kinds = reader.get("layer_types", [LINEAR if (i + 1) % interval else FULL for i in range(num_layers)])
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {FULL} <= set(kinds) <= {FULL, LINEAR}:
        raise reader.fail(
            "layer_types", f"expected {FULL} or {LINEAR} for each of {num_layers} layers, and {FULL} at least once"
        )
    rope = partial_rope(reader, shared["head_dim"], shared["max_positions"], 0.25)
    return (rope_fields(rope, shared) | attention_bias(reader)) | {
        "layer_types": tuple(kinds),
        "linear": qwen3_next_linear(reader),
        "qk_norm": True,
    }


def _olmoe(reader: ConfigReader, shared: Fields) -> Fields:
    reader.refuse("clip_qkv", (), "clipped queries, keys and values are not supported")
    fields = one_rope(reader, shared) | one_window(reader, shared, None) | attention_bias(reader)
    return fields | {"moe": olmoe_experts(reader)}


def _glm4_moe(reader: ConfigReader, shared: Fields) -> Fields:
    """Read GLM-4 MoE: multi-token prediction layers follow the others, as in DeepSeek-V3, and are skipped."""
    rope = partial_rope(reader, shared["head_dim"], shared["max_positions"], 0.5)
    return (rope_fields(rope, shared) | one_window(reader, shared, None)) | {
        "moe": glm4_experts(reader),
        "qk_norm": reader.flag("use_qk_norm"),
        "qkv_bias": reader.flag("attention_bias"),
        "num_skipped_layers": _num_mtp_layers(reader),
    }


def _num_mtp_layers(reader: ConfigReader) -> int:
    return reader.count("num_nextn_predict_layers", 1, minimum=0)


def _minimax_m2(reader: ConfigReader, shared: Fields) -> Fields:
    """Read MiniMax-M2; published configs have ``rotary_dim`` instead of ``partial_rotary_factor``."""
    reader.refuse("use_qk_norm", (True,), "MiniMax-M2 has norms of queries and keys")
    partial = reader.count("rotary_dim", shared["head_dim"]) / shared["head_dim"]
    rope = partial_rope(reader, shared["head_dim"], shared["max_positions"], partial, 5e6)
    return rope_fields(rope, shared) | one_window(reader, shared, None) | {"moe": minimax_m2_experts(reader)}


def _llama4(reader: ConfigReader, shared: Fields) -> Fields:
    """Read Llama 4: layers with rotary embedding have chunked attention."""
    num_layers = shared["num_layers"]
    no_rope, chunk = layers_without_rope(reader, num_layers), reader.optional_count("attention_chunk_size", 8192)
    kinds = layer_kinds(reader, [FULL if i in no_rope else CHUNKED for i in range(num_layers)], CHUNKED)
    tuned = reader.flag("attn_temperature_tuning", default=True)
    return (one_rope(reader, shared, 5e5) | attention_bias(reader)) | {
        "layer_types": kinds,
        "chunk_size": chunk,
        "no_rope_layers": no_rope,
        "temperature_floor": reader.count("floor_scale", 8192) if tuned else None,
        "temperature_offset": 1,
        "temperature_scale": reader.number("attn_scale", 0.1),
        "qk_norm": reader.flag("use_qk_norm", default=True),
        "moe": llama4_experts(reader, num_layers),
        "intermediate_size": reader.count("intermediate_size_mlp", 16384),
    }


def _jamba(reader: ConfigReader, shared: Fields) -> Fields:
    """Read Jamba: every ``attn_layer_period``-th layer from ``attn_layer_offset`` on has attention, others Mamba."""
    reader.refuse("hidden_act", ("silu",), "the convolution of Jamba is followed by silu")
    reader.refuse("mamba_inner_layernorms", (True,), "Jamba has norms within its Mamba layers")
    reader.refuse("sliding_window", (), "the attention of Jamba has no window")
    num_layers, (period, offset) = shared["num_layers"], periodic(reader, "attn_layer", 8, 4)
    return unrotated(shared) | {
        "layer_types": tuple(FULL if i % period == offset else LINEAR for i in range(num_layers)),
        "mamba1": jamba_mamba(reader, shared["hidden_size"]),
        "moe": jamba_experts(reader, num_layers),
    }


_NEMOTRON_H_LAYERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS, "mamba": LINEAR, "attention": FULL}
"""Characters of ``hybrid_override_pattern`` and older names of layer kinds -> layer kinds."""


def _nemotron_h_names(reader: ConfigReader) -> ConfigReader:
    """Derive the layer kinds and the number of layers, and rename the epsilon of the norms."""
    pattern = reader.get("layers_block_type") or list(reader.get("hybrid_override_pattern", "ME*-"))
    kinds = [_NEMOTRON_H_LAYERS.get(kind, kind) for kind in pattern] if isinstance(pattern, list) else []
    if not kinds or not set(kinds) <= set(_NEMOTRON_H_LAYERS.values()):
        name = "layers_block_type" if reader.get("layers_block_type") else "hybrid_override_pattern"
        raise reader.fail(name, f"expected {LINEAR} (M), {FULL} (*), {MLP} (-) or {EXPERTS} (E) for each layer")
    names = {
        "layer_types": kinds,
        "num_hidden_layers": len(kinds),
        "rms_norm_eps": reader.get("layer_norm_epsilon", 1e-5),
    }
    return ConfigReader(reader.path, {"intermediate_size": 21504, "head_dim": 128} | reader.values | names)


def _nemotron_h(reader: ConfigReader, shared: Fields) -> Fields:
    """Read Nemotron-H: layers of four kinds, attention without rotary embedding; MTP layers are skipped."""
    reader.refuse("mamba_hidden_act", ("silu",), "the convolution of Nemotron-H is followed by silu")
    for name in ("attention_bias", "residual_in_fp32"):
        reader.refuse(name, (False,), "it is not supported in this architecture")
    reader.refuse("sliding_window", (), "the attention of Nemotron-H has no window")
    kinds = tuple(reader.values["layer_types"])
    return unrotated(shared) | {
        "layer_types": kinds,
        "mamba": nemotron_h_mamba(reader) if LINEAR in kinds else None,
        "moe": nemotron_h_experts(reader) if EXPERTS in kinds else None,
        "mlp_bias": reader.flag("mlp_bias"),
    }


_LLAMA4: Fields = {"head_dim": 128, "num_kv_heads": 8, "max_positions": 131072, "rms_norm_eps": 1e-5}


def _deepseek_v2(reader: ConfigReader, shared: Fields) -> Fields:
    moe = {"moe": deepseek_v2_experts(reader), "mlp_bias": reader.flag("mlp_bias")}
    return _deepseek(reader, shared) | moe


def _deepseek_v3(reader: ConfigReader, shared: Fields) -> Fields:
    """Read DeepSeek-V3; the multi-token prediction layers (arXiv:2412.19437, section 2.2) at the end are skipped."""
    skipped = {"num_skipped_layers": _num_mtp_layers(reader)}
    return _deepseek(reader, shared) | {"moe": deepseek_v3_experts(reader)} | skipped


def _deepseek(reader: ConfigReader, shared: Fields) -> Fields:
    """Read the common fields of DeepSeek; ``head_dim`` is the rotated part of a head, as in transformers."""
    mla = deepseek_attention(reader)
    rotated = shared | {"head_dim": mla.rope_dim}
    fields = one_rope(reader, rotated) | one_window(reader, shared, None) | attention_bias(reader)
    return fields | {"mla": mla, "head_dim": mla.rope_dim}


_KIMI_LINEAR_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Kimi-Linear's keys -> DeepSeek-V3's keys for the same settings."""


def _kimi_linear(reader: ConfigReader, shared: Fields) -> Fields:
    """Read Kimi-Linear: layers with Kimi Delta Attention, or with latent attention without rotary embedding."""
    reader.refuse("mla_use_nope", (True,), "the latent attention of Kimi-Linear has no rotary embedding")
    reader.refuse("hidden_act", ("silu",), "the convolution of Kimi-Linear is followed by silu")
    reader.refuse("num_key_value_heads", (shared["num_heads"],), "latent attention has one for each head")
    reader.refuse("num_nextn_predict_layers", (0,), "MTP layers of Kimi-Linear are not supported")
    linear, kinds = kimi_linear_attention(reader, shared["num_layers"])
    mla = deepseek_attention(reader.with_defaults({"q_lora_rank": None}))
    return (unrotated(shared) | attention_bias(reader)) | {
        "layer_types": kinds,
        "linear": linear,
        "mla": mla,
        "head_dim": mla.rope_dim,
        "moe": kimi_linear_experts(reader, shared["num_layers"]),
    }


def _sparse_names(reader: ConfigReader) -> ConfigReader:
    """Drop ``layer_types`` of indexed attention, which is full attention to selected keys.

    Raises CheckpointError for other layer types.
    """
    kinds = reader.get("layer_types")
    names = {"indexed_attention", "deepseek_sparse_attention"}  # the latter is the name before transformers 5.23
    if isinstance(kinds, list) and not names.issuperset(kinds):
        raise reader.fail("layer_types", "this architecture has layers of indexed_attention only")
    return ConfigReader(reader.path, reader.values | {"layer_types": None})


def _deepseek_v32(reader: ConfigReader, shared: Fields) -> Fields:
    """Read DeepSeek-V3.2; the MTP layers at the end are skipped."""
    return _sparse(reader, shared, (8, 4), default_heads=64, is_interleaved=False)


def _glm_moe_dsa(reader: ConfigReader, shared: Fields) -> Fields:
    """Read GLM-MoE-DSA: DeepSeek-V3.2 with layers that use the keys selected by the previous layer."""
    return _sparse(reader, shared, (1, 1), default_heads=32, is_interleaved=True)


def _sparse(
    reader: ConfigReader, shared: Fields, groups: tuple[int, int], *, default_heads: int, is_interleaved: bool
) -> Fields:
    reader.refuse("rope_interleave", (True,), "the latent attention of this architecture rotates adjacent features")
    reader.refuse("mlp_bias", (False,), "it is not supported in this architecture")
    num_layers = shared["num_layers"]
    if reader.optional_count("q_lora_rank", 1536) is None:
        raise reader.fail("q_lora_rank", "the indexer reads the queries' latent")
    return _deepseek(reader, shared) | {
        "moe": sparse_attention_experts(reader, num_layers, groups),
        "index": indexer(reader, num_layers, default_heads=default_heads, is_interleaved=is_interleaved),
        "num_skipped_layers": _num_mtp_layers(reader),
    }


_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _gpt_oss(reader: ConfigReader, shared: Fields) -> Fields:
    """Read gpt-oss: sliding-window and full-attention layers alternate."""
    reader.refuse("hidden_act", ("silu",), "the experts of gpt-oss have a clamped swish-gated unit")
    if not (reader.get("rope_scaling") or reader.get("rope_parameters")):
        reader = ConfigReader(reader.path, reader.values | {"rope_parameters": _GPT_OSS_ROPE})
    kinds = layer_kinds(reader, [FULL if i % 2 else SLIDING for i in range(shared["num_layers"])])
    fields = one_rope(reader, shared, 150000.0) | attention_bias(reader, default=True)
    window = reader.optional_count("sliding_window", 128)
    return fields | windows(reader, kinds, window) | {"moe": gpt_oss_experts(reader)}


_QWEN3_5: Fields = {"head_dim": 256, "num_kv_heads": 4, "max_positions": 32768}
_QWEN3_5_MOE: Fields = {**_QWEN3_5, "num_kv_heads": 2, "text_defaults": {"intermediate_size": 512}}

SPARSE = {
    "MixtralForCausalLM": Family(model_type="mixtral", read=_mixtral, max_positions=131072, rms_norm_eps=1e-5),
    "Qwen2MoeForCausalLM": Family(model_type="qwen2_moe", read=_qwen2_moe, num_kv_heads=16, max_positions=32768),
    "Qwen3MoeForCausalLM": Family(model_type="qwen3_moe", read=_qwen3_moe, num_kv_heads=4, max_positions=32768),
    "Qwen3NextForCausalLM": Family(
        model_type="qwen3_next", read=_qwen3_next, head_dim=256, num_kv_heads=2, max_positions=32768
    ),
    "Qwen3_5ForCausalLM": Family(model_type="qwen3_5_text", read=_qwen3_5, **_QWEN3_5),
    "Qwen3_5MoeForCausalLM": Family(model_type="qwen3_5_moe_text", read=_qwen3_5_moe, **_QWEN3_5_MOE),
    "Qwen3_5ForConditionalGeneration": Family(model_type="qwen3_5", read=_qwen3_5, is_multimodal=True, **_QWEN3_5),
    "Qwen3_5MoeForConditionalGeneration": Family(
        model_type="qwen3_5_moe", read=_qwen3_5_moe, is_multimodal=True, **_QWEN3_5_MOE
    ),
    "GptOssForCausalLM": Family(
        model_type="gpt_oss", read=_gpt_oss, head_dim=64, num_kv_heads=8, max_positions=131072, rms_norm_eps=1e-5
    ),
    "JambaForCausalLM": Family(model_type="jamba", read=_jamba, num_kv_heads=8, max_positions=262144),
    "NemotronHForCausalLM": Family(
        model_type="nemotron_h",
        prepare=_nemotron_h_names,
        read=_nemotron_h,
        num_kv_heads=8,
        max_positions=4096,
        activation_key="mlp_hidden_act",
        activation="relu2",
        activations=(*ACTIVATIONS, "relu2"),
    ),
    "OlmoeForCausalLM": Family(model_type="olmoe", read=_olmoe, max_positions=4096, rms_norm_eps=1e-5),
    "Glm4MoeForCausalLM": Family(
        model_type="glm4_moe", read=_glm4_moe, num_kv_heads=8, max_positions=131072, rms_norm_eps=1e-5
    ),
    "MiniMaxM2ForCausalLM": Family(
        model_type="minimax_m2", read=_minimax_m2, head_dim=128, num_kv_heads=8, max_positions=196608
    ),
    "Llama4ForCausalLM": Family(model_type="llama4_text", read=_llama4, **_LLAMA4),
    "Llama4ForConditionalGeneration": Family(model_type="llama4", read=_llama4, is_multimodal=True, **_LLAMA4),
    "KimiLinearForCausalLM": Family(
        model_type="kimi_linear",
        prepare=lambda reader: reader.renamed(_KIMI_LINEAR_NAMES),
        read=_kimi_linear,
        max_positions=1048576,
        rms_norm_eps=1e-5,
    ),
    "DeepseekV2ForCausalLM": Family(model_type="deepseek_v2", read=_deepseek_v2),
    "DeepseekV3ForCausalLM": Family(model_type="deepseek_v3", read=_deepseek_v3, max_positions=4096),
    "DeepseekV32ForCausalLM": Family(
        model_type="deepseek_v32", prepare=_sparse_names, read=_deepseek_v32, max_positions=163840
    ),
    "GlmMoeDsaForCausalLM": Family(
        model_type="glm_moe_dsa",
        prepare=_sparse_names,
        read=_glm_moe_dsa,
        max_positions=202752,
        rms_norm_eps=1e-5,
    ),
}
"""Architecture name of config.json -> family."""
