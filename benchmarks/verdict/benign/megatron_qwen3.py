"""transformers against Megatron-core: norms of queries and keys."""

FAMILY = "qwen3"
TARGET = [
    {"framework": "megatron"},
    {"framework": "megatron", "tp": 2},
    {"framework": "megatron", "dtype": "bfloat16"},
    {"framework": "megatron", "tp": 2, "dtype": "bfloat16"},
]
