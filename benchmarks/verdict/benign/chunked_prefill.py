"""Prompts in chunks of five tokens."""

FAMILY = ["llama", "qwen2", "gpt2"]
TARGET = [{"schedule": "chunks"}, {"schedule": "chunks", "dtype": "bfloat16"}, {"schedule": "chunks", "batch": "right"}]
