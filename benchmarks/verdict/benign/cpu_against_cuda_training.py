"""A backward pass, and three optimizer steps, on a CPU and on a GPU."""

FAMILY = ["llama", "qwen3-moe", "gpt2"]
BOTH = [
    {"train": True, "schedule": "whole"},
    {"train": True, "schedule": "whole", "optimizer": "adamw"},
    {"train": True, "schedule": "whole", "dtype": "bfloat16"},
]
TARGET = {"device": "cuda"}
