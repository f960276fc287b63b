"""Eager attention on a CPU, a fused one on a GPU (Gemma 2's has no soft cap)."""

FAMILY = ["llama", "llama-deep", "qwen3", "qwen3-moe", "mixtral", "gpt2", "deepseek-v3"]
TARGET = [
    {"device": "cuda", "attention": "sdpa"},
    {"device": "cuda", "attention": "sdpa", "dtype": "bfloat16"},
]
