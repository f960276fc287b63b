"""MlaConfig: sizes of multi-head latent attention in config.json (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

from dataclasses import dataclass

from tapscope.engine.hf_config.config_reader import ConfigReader


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    """Sizes of latents and heads."""

    q_lora_rank: int | None
    """Features of the queries' latent; None if queries are projected directly."""
    kv_lora_rank: int
    """Features of the latent that keys and values are projected from; the cache holds latents."""
    nope_dim: int
    """Features of a query or key head without position (``qk_nope_head_dim``)."""
    rope_dim: int
    """Features with rotary embedding (``qk_rope_head_dim``); those of the key are shared by all heads."""
    value_dim: int
    """Features of a value head (``v_head_dim``)."""
    is_interleaved: bool = True
    """Whether rotated pairs are adjacent, (0, 1), (2, 3), ..., in the projections' features, or in separate halves."""

    @property
    def head_dim(self) -> int:
        """Features of a query or key head."""
        return self.nope_dim + self.rope_dim

    def facts(self) -> dict[str, int | float]:
        """The sizes that determine tensor layouts, under their names in config.json."""
        return {
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.value_dim,
        }


def deepseek_attention(reader: ConfigReader) -> MlaConfig:
    """DeepseekV2Config and DeepseekV3Config; raises CheckpointError."""
    rope_dim = reader.count("qk_rope_head_dim", 64)
    if rope_dim % 2:
        raise reader.fail("qk_rope_head_dim", "rotary embedding needs an even one")
    return MlaConfig(
        q_lora_rank=reader.optional_count("q_lora_rank", 1536),
        kv_lora_rank=reader.count("kv_lora_rank", 512),
        nope_dim=reader.count("qk_nope_head_dim", 128),
        rope_dim=rope_dim,
        value_dim=reader.count("v_head_dim", 128),
        is_interleaved=reader.flag("rope_interleave", default=True),
    )
