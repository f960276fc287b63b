"""LinearAttentionConfig: settings of linear attention layers in config.json."""

from dataclasses import dataclass

from tapscope.engine.hf_config.config_reader import ConfigReader
from tapscope.engine.hf_config.family import FULL, LINEAR


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionConfig:
    """Sizes of layers with a gated delta rule (arXiv:2412.06464)."""

    num_key_heads: int
    num_value_heads: int
    """Number of value heads, a multiple of ``num_key_heads``: each key head serves consecutive value heads."""
    key_dim: int
    value_dim: int
    """Sizes of one key head and one value head."""
    kernel: int
    """Kernel size of the causal convolution in positions, including the current one."""

    @property
    def group(self) -> int:
        """Number of value heads per key head."""
        return self.num_value_heads // self.num_key_heads

    def facts(self) -> dict[str, int | float]:
        """Return the sizes that determine tensor layouts, under their keys in config.json."""
        return {
            "linear_num_key_heads": self.num_key_heads,
            "linear_num_value_heads": self.num_value_heads,
            "linear_key_head_dim": self.key_dim,
            "linear_value_head_dim": self.value_dim,
        }


def qwen3_next_linear(reader: ConfigReader) -> LinearAttentionConfig:
    """Read the linear attention of a Qwen3NextConfig; raises CheckpointError."""
    config = LinearAttentionConfig(
        num_key_heads=reader.count("linear_num_key_heads", 16),
        num_value_heads=reader.count("linear_num_value_heads", 32),
        key_dim=reader.count("linear_key_head_dim", 128),
        value_dim=reader.count("linear_value_head_dim", 128),
        kernel=reader.count("linear_conv_kernel_dim", 4, minimum=2),
    )
    if config.num_value_heads % config.num_key_heads:
        raise reader.fail("linear_num_value_heads", f"{config.num_key_heads} key heads do not divide it")
    return config


def kimi_linear_attention(reader: ConfigReader, num_layers: int) -> tuple[LinearAttentionConfig, tuple[str, ...]]:
    """Read the linear attention sizes and the kind of each layer from a KimiLinearConfig; raises CheckpointError.

    Published configs have both in ``linear_attn_config``, with layers counted from 1.
    """
    section = reader.section("linear_attn_config")
    names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
    names["short_conv_kernel_size"] = "linear_conv_kernel_dim"
    own = reader if section is None else section.renamed(names).with_defaults(reader.values)
    heads, size = own.count("linear_num_heads", 32), own.count("linear_head_dim", 128)
    config = LinearAttentionConfig(
        num_key_heads=heads,
        num_value_heads=heads,
        key_dim=size,
        value_dim=size,
        kernel=own.count("linear_conv_kernel_dim", 4, minimum=2),
    )
    kinds = reader.get("layer_types")
    if kinds is None and section is not None and "full_attn_layers" in section.values:
        kinds = _kinds_by_number(section, num_layers)
    if kinds is None:
        kinds = [FULL if i and i % 4 == 0 else LINEAR for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= {FULL, LINEAR}:
        raise reader.fail("layer_types", f"expected {FULL} or {LINEAR} for each of {num_layers} layers")
    return config, tuple(kinds)


def _kinds_by_number(section: ConfigReader, num_layers: int) -> list[str]:
    """Derive the kind of each layer from ``full_attn_layers`` and ``kda_layers``, which count layers from 1."""
    full, linear = section.get("full_attn_layers"), section.get("kda_layers")
    every = list(range(1, num_layers + 1))
    if not (isinstance(full, list) and isinstance(linear, list)) or sorted([*full, *linear], key=str) != sorted(
        every, key=str
    ):
        raise section.fail("full_attn_layers", f"with kda_layers it must name each layer from 1 to {num_layers} once")
    return [FULL if i in full else LINEAR for i in every]
