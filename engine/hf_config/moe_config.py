"""MoeConfig: settings of the mixture of experts in config.json, with one reader per family."""

from dataclasses import dataclass, replace

from tapscope.engine.hf_config.config_reader import ConfigReader


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Number and size of the experts, and routing parameters."""

    num_experts: int
    top_k: int
    """Number of experts per token."""
    intermediate_size: int
    """Intermediate size of one expert."""
    shared_size: int = 0
    """Intermediate size of the shared expert, which every token passes through; 0: none."""
    dense_layers: frozenset[int] = frozenset()
    """Layers with a dense MLP instead of experts."""
    is_normalized: bool = True
    """Whether a token's expert weights are divided by their sum (``norm_topk_prob``)."""
    scale: float = 1.0
    """Factor of the expert weights (``routed_scaling_factor``)."""
    num_groups: int = 1
    top_groups: int = 1
    """Group-limited routing: experts are chosen only from the best ``top_groups`` of ``num_groups`` groups."""
    block: str = "mlp"
    """Name of the ``mlp`` module in checkpoints: published Mixtral has ``block_sparse_moe``."""
    swiglu_alpha: float = 1.0
    swiglu_limit: float = float("inf")
    """Factor of the gate inside the sigmoid, and clamp limit of gate and up (gpt-oss)."""
    latent_size: int | None = None
    """Size of the latent that experts read and write (Nemotron 3); None: experts use the hidden states."""
    feature_block: int = 1
    """Granularity of sharding in features: the features of an MXFP4 block, which share a scale, stay on one rank."""
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of one expert's matrices in checkpoints."""

    def facts(self) -> dict[str, int | float]:
        """Return the sizes that determine tensor layouts, under their keys in config.json."""
        facts: dict[str, int | float] = {
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.intermediate_size,
        }
        if self.num_groups > 1:
            facts |= {"n_group": self.num_groups, "topk_group": self.top_groups}
        return facts


def mixtral_experts(reader: ConfigReader) -> MoeConfig:
    """Read the experts of a MixtralConfig; raises CheckpointError."""
    moe = MoeConfig(
        num_experts=reader.count("num_local_experts", 8),
        top_k=reader.count("num_experts_per_tok", 2),
        intermediate_size=reader.count("intermediate_size"),
        block="block_sparse_moe",
        parts=("w1", "w3", "w2"),
    )
    return _checked(moe, reader)


def qwen2_experts(reader: ConfigReader, num_layers: int) -> MoeConfig:
    """Read the experts of a Qwen2MoeConfig; raises CheckpointError."""
    defaults = MoeConfig(num_experts=60, top_k=4, intermediate_size=1408, shared_size=5632, is_normalized=False)
    return _qwen_experts(reader, num_layers, defaults)


def qwen3_experts(reader: ConfigReader, num_layers: int) -> MoeConfig:
    """Read the experts of a Qwen3MoeConfig; raises CheckpointError."""
    defaults = MoeConfig(num_experts=128, top_k=8, intermediate_size=768, is_normalized=False)
    return _qwen_experts(reader, num_layers, defaults)


def qwen3_next_experts(reader: ConfigReader, num_layers: int) -> MoeConfig:
    """Read the experts of a Qwen3NextConfig; raises CheckpointError."""
    defaults = MoeConfig(num_experts=512, top_k=10, intermediate_size=512, shared_size=512)
    return _qwen_experts(reader, num_layers, defaults)


def qwen3_5_experts(reader: ConfigReader, num_layers: int) -> MoeConfig:
    """Read the experts of a Qwen3_5MoeTextConfig; raises CheckpointError."""
    defaults = MoeConfig(num_experts=256, top_k=8, intermediate_size=512, shared_size=512)
    return _qwen_experts(reader, num_layers, defaults)


def olmoe_experts(reader: ConfigReader) -> MoeConfig:
    """Read the experts of an OlmoeConfig; raises CheckpointError."""
    moe = MoeConfig(
        num_experts=reader.count("num_experts", reader.get("num_local_experts", 64)),
        top_k=reader.count("num_experts_per_tok", 8),
        intermediate_size=reader.count("intermediate_size"),
        is_normalized=reader.flag("norm_topk_prob"),
    )
    return _checked(moe, reader)


def glm4_experts(reader: ConfigReader) -> MoeConfig:
    """Read the experts of a Glm4MoeConfig; raises CheckpointError."""
    return _deepseek_experts(
        reader,
        default_shared=1,
        is_normalized=reader.flag("norm_topk_prob", default=True),
        scale=reader.number("routed_scaling_factor", 1.0),
        num_groups=reader.count("n_group", 1),
        top_groups=reader.count("topk_group", 1),
    )


def minimax_m2_experts(reader: ConfigReader) -> MoeConfig:
    """Read the experts of a MiniMaxM2Config; raises CheckpointError."""
    reader.refuse("scoring_func", ("sigmoid",), "MiniMax-M2 scores by sigmoid")
    reader.refuse("shared_intermediate_size", (0,), "MiniMax-M2 has no shared expert")
    return mixtral_experts(reader.with_defaults({"num_local_experts": 256, "num_experts_per_tok": 8}))


def llama4_experts(reader: ConfigReader, num_layers: int) -> MoeConfig:
    """Read the experts of a Llama4TextConfig; raises CheckpointError.

    They are in ``moe_layers``, by default in every ``interleave_moe_layer_step``-th layer.
    """
    step, size = reader.count("interleave_moe_layer_step", 1), reader.count("intermediate_size", 8192)
    sparse = (
        _layers(reader, "moe_layers") if reader.get("moe_layers") is not None else range(step - 1, num_layers, step)
    )
    moe = MoeConfig(
        num_experts=reader.count("num_local_experts", 16),
        top_k=reader.count("num_experts_per_tok", 1),
        intermediate_size=size,
        shared_size=size,
        dense_layers=frozenset(range(num_layers)) - frozenset(sparse),
        is_normalized=False,
    )
    return _checked(moe, reader)


def gpt_oss_experts(reader: ConfigReader) -> MoeConfig:
    """Read the experts of a GptOssConfig; raises CheckpointError."""
    moe = MoeConfig(
        num_experts=reader.count("num_local_experts", reader.get("num_experts", 128)),
        top_k=reader.count("num_experts_per_tok", reader.get("experts_per_token", 4)),
        intermediate_size=reader.count("intermediate_size"),
        swiglu_alpha=reader.number("swiglu_alpha", 1.702),
        swiglu_limit=reader.number("swiglu_limit", 7.0),
        feature_block=32,
    )
    return _checked(moe, reader)


def jamba_experts(reader: ConfigReader, num_layers: int) -> MoeConfig | None:
    """Read the experts of a JambaConfig; None for a dense model. Raises CheckpointError.

    Every ``expert_layer_period``-th layer has experts, beginning with layer ``expert_layer_offset``.
    """
    count = reader.count("num_experts", reader.get("num_local_experts", 16))
    period, offset = periodic(reader, "expert_layer", 2, 1)
    moe = MoeConfig(
        num_experts=count,
        top_k=reader.count("num_experts_per_tok", 2),
        intermediate_size=reader.count("intermediate_size"),
        dense_layers=frozenset(layer for layer in range(num_layers) if layer % period != offset),
        is_normalized=False,
    )
    return None if count == 1 else _checked(moe, reader)


def periodic(reader: ConfigReader, name: str, period: int, offset: int) -> tuple[int, int]:
    """Read ``NAME_period`` and ``NAME_offset``, which must be below the period; raises CheckpointError."""
    period = reader.count(f"{name}_period", period)
    return period, reader.count(f"{name}_offset", offset, minimum=0, maximum=period - 1)


def nemotron_h_experts(reader: ConfigReader) -> MoeConfig:
    """Read the experts of a NemotronHConfig; raises CheckpointError."""
    moe = MoeConfig(
        num_experts=reader.count("n_routed_experts", reader.get("num_local_experts", 8)),
        top_k=reader.count("num_experts_per_tok", 2),
        intermediate_size=reader.count("moe_intermediate_size", 7688),
        shared_size=reader.count("moe_shared_expert_intermediate_size", 7688),
        is_normalized=reader.flag("norm_topk_prob", default=True),
        scale=reader.number("routed_scaling_factor", 1.0),
        num_groups=reader.count("n_group", 1),
        top_groups=reader.count("topk_group", 1),
        latent_size=reader.optional_count("moe_latent_size", None),
    )
    return _checked(moe, reader)


def deepseek_v2_experts(reader: ConfigReader) -> MoeConfig:
    """Read the experts of a DeepseekV2Config; raises CheckpointError.

    As in transformers, ``norm_topk_prob`` is ignored: expert weights are never normalized.
    """
    reader.refuse("scoring_func", ("softmax",), "DeepSeek-V2 scores by softmax")
    grouped = reader.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy") != "greedy"
    return _deepseek_experts(
        reader,
        default_shared=2,
        is_normalized=False,
        scale=reader.number("routed_scaling_factor", 1.0),
        num_groups=reader.count("n_group") if grouped else 1,
        top_groups=reader.count("topk_group") if grouped else 1,
    )


def sparse_attention_experts(reader: ConfigReader, num_layers: int, groups: tuple[int, int]) -> MoeConfig:
    """Read the experts of a DeepseekV32Config or GlmMoeDsaConfig; raises CheckpointError.

    ``mlp_layer_types`` lists the dense layers, by default the first three; ``groups`` are the default group counts.
    """
    dense = _dense_layers(reader, num_layers, 3)
    moe = deepseek_v3_experts(reader.with_defaults({"n_group": groups[0], "topk_group": groups[1]}))
    return replace(moe, dense_layers=dense)


def kimi_linear_experts(reader: ConfigReader, num_layers: int) -> MoeConfig:
    """Read the experts of a KimiLinearConfig, which are DeepSeek-V3's; raises CheckpointError.

    ``mlp_layer_types`` lists the dense layers, by default the first layer.
    """
    reader.refuse("moe_router_activation_func", ("sigmoid",), "Kimi-Linear scores by sigmoid")
    reader.refuse("use_grouped_topk", (True,), "Kimi-Linear chooses within the best groups")
    defaults = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446, "num_experts_per_tok": 8}
    moe = deepseek_v3_experts(reader.with_defaults(defaults))
    return replace(moe, dense_layers=_dense_layers(reader, num_layers, 1), parts=("w1", "w3", "w2"))


def _dense_layers(reader: ConfigReader, num_layers: int, default: int) -> frozenset[int]:
    """Return the dense layers in ``mlp_layer_types``; without this key, the first ``first_k_dense_replace`` layers."""
    kinds, count = reader.get("mlp_layer_types"), reader.get("first_k_dense_replace", default)
    if kinds is None:
        kinds = ["dense" if i < count else "sparse" for i in range(num_layers)] if type(count) is int else []
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise reader.fail("mlp_layer_types", f"expected dense or sparse for each of {num_layers} layers")
    return frozenset(i for i, kind in enumerate(kinds) if kind == "dense")


def deepseek_v3_experts(reader: ConfigReader) -> MoeConfig:
    """Read the experts of a DeepseekV3Config; raises CheckpointError."""
    reader.refuse("scoring_func", ("sigmoid",), "DeepSeek-V3 scores by sigmoid")
    reader.refuse("topk_method", ("noaux_tc",), "DeepSeek-V3 chooses by noaux_tc")
    moe = _deepseek_experts(
        reader,
        default_shared=1,
        is_normalized=reader.flag("norm_topk_prob", default=True),
        scale=reader.number("routed_scaling_factor", 2.5),
        num_groups=reader.count("n_group", 8),
        top_groups=reader.count("topk_group", 4),
    )
    if moe.num_groups > 1 and moe.num_experts // moe.num_groups < 2:
        rule = f"a group must have at least two of the {moe.num_experts} experts, as its score is that of its two best"
        raise reader.fail("n_group", rule)
    return moe


def _qwen_experts(reader: ConfigReader, num_layers: int, defaults: MoeConfig) -> MoeConfig:
    """Read the experts of a Qwen family with the given ``defaults``, which define whether it has a shared expert.

    transformers 5 writes ``num_local_experts`` where published configs have ``num_experts``.
    """
    step = reader.count("decoder_sparse_step", 1)
    dense = _layers(reader, "mlp_only_layers") | {i for i in range(num_layers) if (i + 1) % step}
    shared = reader.count("shared_expert_intermediate_size", defaults.shared_size) if defaults.shared_size else 0
    moe = MoeConfig(
        num_experts=reader.count("num_experts", reader.get("num_local_experts", defaults.num_experts)),
        top_k=reader.count("num_experts_per_tok", defaults.top_k),
        intermediate_size=reader.count("moe_intermediate_size", defaults.intermediate_size),
        shared_size=shared,
        dense_layers=frozenset(dense),
        is_normalized=reader.flag("norm_topk_prob", default=defaults.is_normalized),
    )
    return _checked(moe, reader)


def _deepseek_experts(
    reader: ConfigReader, *, default_shared: int, is_normalized: bool, scale: float, num_groups: int, top_groups: int
) -> MoeConfig:
    reader.refuse("moe_layer_freq", (1,), "every layer after first_k_dense_replace must have experts")
    size = reader.count("moe_intermediate_size")
    num_dense = reader.count("first_k_dense_replace", 0, minimum=0)
    moe = MoeConfig(
        num_experts=reader.count("n_routed_experts"),
        top_k=reader.count("num_experts_per_tok"),
        intermediate_size=size,
        shared_size=size * reader.count("n_shared_experts", default_shared),
        dense_layers=frozenset(range(num_dense)),
        is_normalized=is_normalized,
        scale=scale,
        num_groups=num_groups,
        top_groups=top_groups,
    )
    return _checked(moe, reader)


def _checked(moe: MoeConfig, reader: ConfigReader) -> MoeConfig:
    if moe.num_experts % moe.num_groups:
        raise reader.fail("n_group", f"it must divide the {moe.num_experts} experts")
    if moe.top_groups > moe.num_groups:
        raise reader.fail("topk_group", f"there are {moe.num_groups} groups")
    choice = moe.num_experts // moe.num_groups * moe.top_groups
    if moe.top_k > choice:
        raise reader.fail("num_experts_per_tok", f"there are {choice} experts to choose from")
    return moe


def _layers(reader: ConfigReader, name: str) -> set[int]:
    layers = reader.get(name, [])
    if not isinstance(layers, list) or any(type(layer) is not int for layer in layers):
        raise reader.fail(name, "expected a list of layer numbers")
    return set(layers)
