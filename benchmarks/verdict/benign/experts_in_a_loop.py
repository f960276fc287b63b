"""Experts computed one after the other instead of in one grouped product."""

FAMILY = ["qwen3-moe", "mixtral", "deepseek-v3", "qwen2-moe"]
TARGET = [{}, {"dtype": "bfloat16"}, {"batch": "separate"}]


def patch(model):
    model.set_experts_implementation("eager")
