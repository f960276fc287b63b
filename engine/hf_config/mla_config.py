"""MlaConfig: sizes of multi-head latent attention in config.json (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

from dataclasses import dataclass

from tapscope.engine.hf_config.config_reader import ConfigReader


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    """Sizes of latents and heads."""

    q_lora_rank: int | None
    """Size of the query latent; None if queries are projected directly."""
    kv_lora_rank: int
    """Size of the latent from which keys and values are projected; the KV cache stores latents."""
    nope_dim: int
    """Size of the part of a query or key head without rotary embedding (``qk_nope_head_dim``)."""
    rope_dim: int
    """Size of the part with rotary embedding (``qk_rope_head_dim``); all heads share the key's part."""
    value_dim: int
    """Size of a value head (``v_head_dim``)."""
    is_interleaved: bool = True
    """Whether rotated pairs are adjacent features, (0, 1), (2, 3), ..., of the projections instead of in two halves."""

    @property
    def head_dim(self) -> int:
        """Size of a query or key head."""
        return self.nope_dim + self.rope_dim

    def facts(self) -> dict[str, int | float]:
        """Return the sizes that determine tensor layouts, under their keys in config.json."""
        return {
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.value_dim,
        }


def deepseek_attention(reader: ConfigReader) -> MlaConfig:
    """Read the attention of a DeepseekV2Config or DeepseekV3Config; raises CheckpointError."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    """Sizes of the indexer of DeepSeek sparse attention (arXiv:2512.02556, section 2)."""

    num_heads: int
    head_dim: int
    top_k: int
    """Number of keys selected for each row."""
    is_interleaved: bool
    """Whether rotated pairs are adjacent features."""
    shared_layers: frozenset[int] = frozenset()
    """Layers without an indexer, which use the keys selected by the previous layer."""

    def facts(self) -> dict[str, int | float]:
        """Return the sizes that determine tensor layouts, under their keys in config.json."""
        return {"index_n_heads": self.num_heads, "index_head_dim": self.head_dim, "index_topk": self.top_k}


def indexer(reader: ConfigReader, num_layers: int, *, default_heads: int, is_interleaved: bool) -> IndexerConfig:
    """Read the indexer of a DeepseekV32Config or GlmMoeDsaConfig; raises CheckpointError."""
    config = IndexerConfig(
        num_heads=reader.count("index_n_heads", default_heads),
        head_dim=reader.count("index_head_dim", 128),
        top_k=reader.count("index_topk", 2048),
        is_interleaved=is_interleaved,
        shared_layers=_shared_layers(reader, num_layers),
    )
    if config.head_dim < reader.count("qk_rope_head_dim", 64):
        raise reader.fail("index_head_dim", "it is less than qk_rope_head_dim")
    return config


def _shared_layers(reader: ConfigReader, num_layers: int) -> frozenset[int]:
    """Return the layers that ``indexer_types`` lists as ``shared``; older configs have a pattern or a frequency."""
    pattern = reader.get("index_topk_pattern")
    kinds = reader.get("indexer_types") or ([*pattern] if isinstance(pattern, str) else pattern)
    if kinds is None:
        every, offset = reader.count("index_topk_freq", 1), reader.get("index_skip_topk_offset", 2)
        if type(offset) is not int:
            raise reader.fail("index_skip_topk_offset", "expected an integer")
        kinds = ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(num_layers)]
    names = {"F": "full", "S": "shared"}
    kinds = [names.get(kind, kind) for kind in kinds] if isinstance(kinds, list) else []
    if len(kinds) != num_layers or not set(kinds) <= {"full", "shared"} or kinds[0] != "full":
        name = "indexer_types" if reader.get("indexer_types") else "index_topk_pattern"
        raise reader.fail(name, f"expected full or shared for each of {num_layers} layers, full first")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "shared")
