"""Families with experts: how their config.json is read, with the defaults of transformers' config classes."""

from tapscope.engine.hf_config.config_reader import ConfigReader
from tapscope.engine.hf_config.dense_families import (
    FULL,
    LINEAR,
    SLIDING,
    Family,
    Fields,
    layer_kinds,
    one_kind,
    windows,
)
from tapscope.engine.hf_config.linear_config import qwen3_next_linear
from tapscope.engine.hf_config.mla_config import deepseek_attention
from tapscope.engine.hf_config.moe_config import (
    deepseek_v2_experts,
    deepseek_v3_experts,
    gpt_oss_experts,
    mixtral_experts,
    qwen2_experts,
    qwen3_experts,
    qwen3_next_experts,
)
from tapscope.engine.hf_config.rope_config import partial_rope, read_rope


def _mixtral(reader: ConfigReader, shared: Fields) -> Fields:
    reader.refuse("attention_bias", (False,), "this architecture has no biases")
    window = reader.optional_count("sliding_window", None)
    fields = _rope(reader, shared, theta=1e6) | _one_window(reader, shared, window)
    return fields | {"moe": mixtral_experts(reader), "rms_norm_eps": reader.number("rms_norm_eps", 1e-5)}


def _qwen2_moe(reader: ConfigReader, shared: Fields) -> Fields:
    """With ``use_sliding_window`` every second layer below ``max_window_layers`` has a window, as in transformers."""
    num_layers, first = shared["num_layers"], reader.get("max_window_layers", 28)
    if type(first) is not int or first < 0:
        raise reader.fail("max_window_layers", "expected an integer from 0")
    window = reader.optional_count("sliding_window", 4096) if reader.flag("use_sliding_window") else None
    slides = (window is not None and (i + 1) % 2 == 1 and i < first for i in range(num_layers))
    kinds = layer_kinds(reader, [SLIDING if each else FULL for each in slides])
    fields = _rope(reader, shared) | windows(reader, kinds, window)
    return fields | {"moe": qwen2_experts(reader, num_layers), "qkv_bias": reader.flag("qkv_bias", default=True)}


def _qwen3_moe(reader: ConfigReader, shared: Fields) -> Fields:
    """All layers have a sliding window, or none; ``max_window_layers`` is ignored, as in transformers."""
    bias = reader.flag("attention_bias")
    window = reader.optional_count("sliding_window", 4096) if reader.flag("use_sliding_window") else None
    fields = _rope(reader, shared) | _one_window(reader, shared, window)
    experts = qwen3_experts(reader, shared["num_layers"])
    return fields | {"moe": experts, "qk_norm": True, "qkv_bias": bias, "o_bias": bias}


def _qwen3_next(reader: ConfigReader, shared: Fields) -> Fields:
    """Every ``full_attention_interval``-th layer has full attention, the others linear attention."""
    num_layers, interval = shared["num_layers"], reader.count("full_attention_interval", 4)
    kinds = reader.get("layer_types", [LINEAR if (i + 1) % interval else FULL for i in range(num_layers)])
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {FULL} <= set(kinds) <= {FULL, LINEAR}:
        raise reader.fail(
            "layer_types", f"expected {FULL} or {LINEAR} for each of {num_layers} layers, and {FULL} at least once"
        )
    bias = reader.flag("attention_bias")
    rope = partial_rope(reader, shared["head_dim"], shared["max_positions"], 0.25)
    return {
        "rope": rope,
        "max_positions": rope.reach(shared["max_positions"]),
        "layer_types": tuple(kinds),
        "linear": qwen3_next_linear(reader),
        "moe": qwen3_next_experts(reader, num_layers),
        "qk_norm": True,
        "qkv_bias": bias,
        "o_bias": bias,
    }


def _deepseek_v2(reader: ConfigReader, shared: Fields) -> Fields:
    moe = {"moe": deepseek_v2_experts(reader), "mlp_bias": reader.flag("mlp_bias")}
    return _deepseek(reader, shared) | moe


def _deepseek_v3(reader: ConfigReader, shared: Fields) -> Fields:
    """Multi-token prediction layers (arXiv:2412.19437, section 2.2) follow the others; they are not computed."""
    num_mtp_layers = reader.get("num_nextn_predict_layers", 1)
    if type(num_mtp_layers) is not int or num_mtp_layers < 0:
        raise reader.fail("num_nextn_predict_layers", "expected an integer from 0")
    return _deepseek(reader, shared) | {"moe": deepseek_v3_experts(reader), "num_skipped_layers": num_mtp_layers}


def _deepseek(reader: ConfigReader, shared: Fields) -> Fields:
    """``head_dim`` is the rotated part of a head, as in transformers."""
    mla, bias = deepseek_attention(reader), reader.flag("attention_bias")
    rotated = shared | {"head_dim": mla.rope_dim}
    fields = _rope(reader, rotated) | _one_window(reader, shared, None)
    return fields | {"mla": mla, "head_dim": mla.rope_dim, "qkv_bias": bias, "o_bias": bias}


_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _gpt_oss(reader: ConfigReader, shared: Fields) -> Fields:
    """Layers with a window and with full attention alternate."""
    reader.refuse("hidden_act", ("silu",), "the experts of gpt-oss have a clamped swish-gated unit")
    if not (reader.get("rope_scaling") or reader.get("rope_parameters")):
        reader = ConfigReader(reader.path, reader.values | {"rope_parameters": _GPT_OSS_ROPE})
    bias = reader.flag("attention_bias", default=True)
    kinds = layer_kinds(reader, [FULL if i % 2 else SLIDING for i in range(shared["num_layers"])])
    fields = _rope(reader, shared, theta=150000.0) | windows(
        reader, kinds, reader.optional_count("sliding_window", 128)
    )
    return fields | {
        "moe": gpt_oss_experts(reader),
        "attention_sinks": True,
        "qkv_bias": bias,
        "o_bias": bias,
        "rms_norm_eps": reader.number("rms_norm_eps", 1e-5),
    }


def _rope(reader: ConfigReader, shared: Fields, theta: float = 1e4) -> Fields:
    rope = read_rope(reader, shared["head_dim"], shared["max_positions"], theta)
    return {"rope": rope, "max_positions": rope.reach(shared["max_positions"])}


def _one_window(reader: ConfigReader, shared: Fields, window: int | None) -> Fields:
    return windows(reader, one_kind(reader, shared, FULL if window is None else SLIDING), window)


SPARSE = {
    "MixtralForCausalLM": Family(model_type="mixtral", read=_mixtral, max_positions=131072),
    "Qwen2MoeForCausalLM": Family(model_type="qwen2_moe", read=_qwen2_moe, num_kv_heads=16, max_positions=32768),
    "Qwen3MoeForCausalLM": Family(model_type="qwen3_moe", read=_qwen3_moe, num_kv_heads=4, max_positions=32768),
    "Qwen3NextForCausalLM": Family(
        model_type="qwen3_next", read=_qwen3_next, head_dim=256, num_kv_heads=2, max_positions=32768
    ),
    "GptOssForCausalLM": Family(model_type="gpt_oss", read=_gpt_oss, head_dim=64, num_kv_heads=8, max_positions=131072),
    "DeepseekV2ForCausalLM": Family(model_type="deepseek_v2", read=_deepseek_v2),
    "DeepseekV3ForCausalLM": Family(model_type="deepseek_v3", read=_deepseek_v3, max_positions=4096),
}
"""Architecture name of config.json -> family."""
