"""Forward and backward in transformers against Megatron-core."""

FAMILY = ["llama", "qwen2"]
BOTH = {"train": True}
TARGET = [
    {"framework": "megatron"},
    {"framework": "megatron", "tp": 2},
    {"framework": "megatron", "tp": 2, "sequence_parallel": True},
    {"framework": "megatron", "tp": 2, "dtype": "bfloat16"},
]
