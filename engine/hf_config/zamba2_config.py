"""SharedBlocks: settings in config.json for Zamba2's attention blocks, which several layers share."""

from dataclasses import dataclass

from tapscope.engine.hf_config.config_reader import ConfigReader
from tapscope.engine.hf_config.family import HYBRID


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBlocks:
    """Shared blocks of attention and MLP, with low-rank adapters for each layer (arXiv:2411.15242)."""

    layers: tuple[int, ...]
    """Layers with a block; the i-th of them uses block i modulo ``num_blocks``."""
    num_blocks: int
    adapter_rank: int
    adapts_attention: bool
    """Whether queries, keys and values have adapters; the MLP always has an adapter."""


def zamba2_blocks(reader: ConfigReader, kinds: tuple[str, ...]) -> SharedBlocks:
    """Read the shared blocks of a Zamba2Config; raises CheckpointError."""
    blocks = SharedBlocks(
        layers=tuple(layer for layer, kind in enumerate(kinds) if kind == HYBRID),
        num_blocks=reader.count("num_mem_blocks", 1),
        adapter_rank=reader.count("adapter_rank", 128),
        adapts_attention=reader.flag("use_shared_attention_adapter"),
    )
    if blocks.adapts_attention:
        rule = "adapters of keys and values have as many heads as queries"
        reader.refuse("num_key_value_heads", (reader.count("num_attention_heads"),), rule)
    return blocks
