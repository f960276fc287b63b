"""LinearAttentionConfig: recurrent layers in config.json."""

from dataclasses import dataclass

from tapscope.engine.hf_config.config_reader import ConfigReader


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionConfig:
    """Sizes of gated delta net layers (arXiv:2412.06464)."""

    num_key_heads: int
    num_value_heads: int
    """A multiple of ``num_key_heads``: each key head serves consecutive value heads."""
    key_dim: int
    value_dim: int
    """Features of one head."""
    kernel: int
    """Positions that the causal convolution sees, a row's own included."""

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.num_value_heads // self.num_key_heads

    def facts(self) -> dict[str, int | float]:
        """The sizes that determine tensor layouts, under their names in config.json."""
        return {
            "linear_num_key_heads": self.num_key_heads,
            "linear_num_value_heads": self.num_value_heads,
            "linear_key_head_dim": self.key_dim,
            "linear_value_head_dim": self.value_dim,
        }


def qwen3_next_linear(reader: ConfigReader) -> LinearAttentionConfig:
    """Qwen3NextConfig; raises CheckpointError."""
    found = LinearAttentionConfig(
        num_key_heads=reader.count("linear_num_key_heads", 16),
        num_value_heads=reader.count("linear_num_value_heads", 32),
        key_dim=reader.count("linear_key_head_dim", 128),
        value_dim=reader.count("linear_value_head_dim", 128),
        kernel=reader.count("linear_conv_kernel_dim", 4),
    )
    if found.num_value_heads % found.num_key_heads:
        raise reader.fail("linear_num_value_heads", f"{found.num_key_heads} key heads do not divide it")
    if found.kernel < 2:
        raise reader.fail("linear_conv_kernel_dim", "expected an integer above 1")
    return found
