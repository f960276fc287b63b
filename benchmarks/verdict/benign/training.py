"""Forward and backward: another attention kernel, dtype or batching."""

FAMILY = ["llama", "qwen3", "gpt2"]
BOTH = {"train": True, "schedule": "whole"}
TARGET = [{"attention": "sdpa"}, {"dtype": "bfloat16"}, {"batch": "right"}]
