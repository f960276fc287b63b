"""Three optimizer steps: another implementation, attention kernel or batching, float32 master weights."""

FAMILY = ["llama", "qwen3", "gpt2"]
BOTH = [
    {"train": True, "schedule": "whole", "optimizer": "adamw"},
    {"train": True, "schedule": "whole", "optimizer": "sgd", "micros": 2},
]
TARGET = [
    {"update": "fused"},
    {"update": "loop"},
    {"attention": "sdpa"},
    {"batch": "right"},
    {"dtype": "bfloat16", "master": True},
    {"dtype": "bfloat16"},
]
