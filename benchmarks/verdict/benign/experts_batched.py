"""Experts computed in one batched product instead of a grouped one."""

FAMILY = ["qwen3-moe", "mixtral", "deepseek-v3"]
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    model.set_experts_implementation("batched_mm")
