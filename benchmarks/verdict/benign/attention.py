"""SDPA instead of eager attention."""

FAMILY = ["llama", "qwen2", "qwen3", "gpt2", "qwen3-moe", "deepseek-v3", "qwen2-moe", "llama4"]
TARGET = [{"attention": "sdpa"}, {"attention": "sdpa", "dtype": "bfloat16"}]
