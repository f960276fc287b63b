"""Eager attention on a CPU, fused attention on a GPU (Gemma 2 without a soft cap)."""

FAMILY = ["llama", "llama-deep", "qwen3", "qwen3-moe", "mixtral", "gpt2", "deepseek-v3"]
TARGET = [
    {"device": "cuda", "attention": "sdpa"},
    {"device": "cuda", "attention": "sdpa", "dtype": "bfloat16"},
]
