"""transformers against Megatron-core: one rank or two, sequence parallel, another dtype."""

FAMILY = ["llama", "qwen2"]
TARGET = [
    {"framework": "megatron"},
    {"framework": "megatron", "tp": 2},
    {"framework": "megatron", "dtype": "bfloat16"},
    {"framework": "megatron", "tp": 2, "dtype": "bfloat16"},
    {"framework": "megatron", "tp": 2, "sequence_parallel": True},
]
