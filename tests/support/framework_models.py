"""A tiny Llama for the tests of framework plugins."""

from typing import Any

from transformers import LlamaConfig


def tiny_llama_config(**settings: Any) -> LlamaConfig:
    """Return a config with two layers, six heads and two key/value heads; ``settings`` override fields."""
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "vocab_size": 97}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaConfig(**(sizes | heads | {"tie_word_embeddings": False} | settings))
