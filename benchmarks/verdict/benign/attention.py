"""SDPA instead of eager attention."""

FAMILY = ["llama", "qwen2", "qwen3", "gpt2", "qwen3-moe"]
TARGET = [{"attention": "sdpa"}, {"attention": "sdpa", "dtype": "bfloat16"}]
