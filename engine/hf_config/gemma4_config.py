"""Config family of Gemma 4's text decoder: two head sizes, proportional RoPE, experts parallel to the MLP."""

from tapscope.engine.hf_config.config_reader import ConfigReader
from tapscope.engine.hf_config.family import (
    FULL,
    SLIDING,
    Family,
    Fields,
    attention_bias,
    layer_kinds,
    rope_fields,
    windows,
)
from tapscope.engine.hf_config.gemma3n_config import LayerInputsConfig, shared_kv_layers
from tapscope.engine.hf_config.moe_config import MoeConfig
from tapscope.engine.hf_config.rope_config import Rope, rope_of

_ROPES: Fields = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_theta": 1e4},
}
_HEADS = "head_dim", "num_key_value_heads"


def _prepare(reader: ConfigReader) -> ConfigReader:
    """Drop ``use_bidirectional_attention`` if it applies to images only; raises CheckpointError otherwise."""
    name = "use_bidirectional_attention"
    reader.refuse(name, (False, "vision"), "only causal attention of text is supported: null or 'vision'")
    return ConfigReader(reader.path, reader.values | {name: None})


def _read(reader: ConfigReader, shared: Fields) -> Fields:
    """Read Gemma 4: every sixth layer has full attention, with its own head size and number of key/value heads."""
    reader.refuse("rope_scaling", (), "this architecture reads rope_parameters of each type of layer only")
    kinds = layer_kinds(reader, [SLIDING if (i + 1) % 6 else FULL for i in range(shared["num_layers"])])
    if kinds[-1] != FULL:
        raise reader.fail("layer_types", f"the last layer must have {FULL}; transformers would silently change it")
    keys_as_values = reader.flag("attention_k_eq_v")
    heads = _heads(reader, shared, kinds, has_own_kv_heads=keys_as_values)
    head_dim, kv_heads = heads.get(SLIDING, heads[FULL])
    ropes = {kind: _rope(reader, kind, dim, shared["max_positions"]) for kind, (dim, _) in heads.items()}
    fields = windows(reader, kinds, reader.optional_count("sliding_window", 512)) | attention_bias(reader)
    return (fields | rope_fields(ropes[FULL], shared)) | {
        "head_dim": head_dim,
        "num_kv_heads": kv_heads,
        "full_head_dim": heads[FULL][0],
        "full_kv_heads": heads[FULL][1],
        "keys_as_values": keys_as_values,
        "qk_norm": True,
        "attention_scale": 1.0,
        "final_softcap": reader.optional_number("final_logit_softcapping"),
        "embedding_scale": shared["hidden_size"] ** 0.5,
        "local_rope": ropes.get(SLIDING),
        "shared_kv_layers": shared_kv_layers(reader, kinds, default=0),
        "wide_shared_mlp": reader.flag("use_double_wide_mlp"),
        "layer_inputs": _layer_inputs(reader, shared),
        "moe": _experts(reader) if reader.flag("enable_moe_block") else None,
    }


def _heads(
    reader: ConfigReader, shared: Fields, kinds: tuple[str, ...], *, has_own_kv_heads: bool
) -> dict[str, tuple[int, int]]:
    """Return (head size, number of key/value heads) for each layer kind.

    Reads the keys of published configs, or the per-layer settings that transformers 5 writes. Raises CheckpointError.
    """
    sliding, own = (shared["head_dim"], shared["num_kv_heads"]), reader.section("per_layer_config")
    if own is None:
        kv_heads = reader.optional_count("num_global_key_value_heads", None) if has_own_kv_heads else None
        full = reader.count("global_head_dim", 512), kv_heads or shared["num_kv_heads"]
        per_layer = [full if kind == FULL else sliding for kind in kinds]
    else:
        if not all(key.isdecimal() and int(key) < len(kinds) for key in own.values):
            raise reader.fail("per_layer_config", f"its keys must be layers, 0 to {len(kinds) - 1}")
        numbered = {int(key): own.section(key) for key in own.values}  # transformers pads the keys with zeros
        per_layer = [_own_heads(numbered.get(layer), layer, sliding) for layer in range(len(kinds))]
    heads = dict(zip(kinds, per_layer, strict=True))
    if any(heads[kind] != each for kind, each in zip(kinds, per_layer, strict=True)):
        raise reader.fail("per_layer_config", f"layers of one type must have equal {' and '.join(_HEADS)}")
    for kind, (dim, kv_heads) in heads.items():
        if dim % 2 or shared["num_heads"] % kv_heads:
            name = "per_layer_config" if own else "global_head_dim" if dim % 2 else "num_global_key_value_heads"
            rule = f"the head size must be even, and key/value heads must divide the {shared['num_heads']} heads"
            raise reader.fail(name, f"layers of {kind} have {kv_heads} key/value heads of {dim} features; {rule}")
    return heads


def _own_heads(values: ConfigReader | None, layer: int, default: tuple[int, int]) -> tuple[int, int]:
    if values is None:
        return default
    unknown = next(iter(set(values.values) - set(_HEADS)), None)
    if unknown is not None:
        raise values.fail(unknown, f"per_layer_config of layer {layer} may have {' and '.join(_HEADS)} only")
    return values.count(_HEADS[0], default[0]), values.count(_HEADS[1], default[1])


def _rope(reader: ConfigReader, kind: str, head_dim: int, max_positions: int) -> Rope:
    """Read the RoPE settings of one layer kind; ``proportional`` rotates the first feature pairs of a head."""
    both = reader.section("rope_parameters") or ConfigReader(reader.path, _ROPES)
    settings = both.section(kind)
    if settings is None or not set(both.values) <= {FULL, SLIDING}:
        raise reader.fail("rope_parameters", f"it must hold settings for {FULL} and {SLIDING}, nothing else")
    theta = settings.number("rope_theta", 1e4)
    if settings.get("rope_type") != "proportional":
        return rope_of(settings, head_dim, max_positions, theta)
    partial = settings.number("partial_rotary_factor", 1.0)
    if partial > 1:
        raise settings.fail("partial_rotary_factor", "expected a number above 0 and at most 1")
    return Rope(kind="proportional", theta=theta, factor=settings.number("factor", 1.0), partial=partial)


def _layer_inputs(reader: ConfigReader, shared: Fields) -> LayerInputsConfig | None:
    size, vocab_size = reader.count("hidden_size_per_layer_input", 256, minimum=0), shared["vocab_size"]
    if size == 0:
        return None
    known = reader.count("vocab_size_per_layer_input", 262144)
    if known < vocab_size:
        raise reader.fail("vocab_size_per_layer_input", f"it must be at least vocab_size, {vocab_size}")
    return LayerInputsConfig(vocab_size=known, size=size)


def _experts(reader: ConfigReader) -> MoeConfig:
    moe = MoeConfig(
        num_experts=reader.count("num_experts"),
        top_k=reader.count("top_k_experts"),
        intermediate_size=reader.count("moe_intermediate_size"),
    )
    if moe.top_k > moe.num_experts:
        raise reader.fail("top_k_experts", f"there are {moe.num_experts} experts to choose from")
    return moe


_SHARED: Fields = {
    "prepare": _prepare,
    "read": _read,
    "head_dim": 256,
    "num_kv_heads": 4,
    "max_positions": 131072,
    "tied": True,
    "activation_key": "hidden_activation",
    "activation": "gelu_pytorch_tanh",
}

GEMMA4 = {
    "Gemma4ForCausalLM": Family(model_type="gemma4_text", **_SHARED),
    "Gemma4ForConditionalGeneration": Family(
        model_type="gemma4",
        is_multimodal=True,
        text_defaults={
            "vocab_size": 262144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
        },
        **_SHARED,
    ),
}
"""Architecture name of config.json -> family."""
