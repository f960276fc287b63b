"""Requests padded on the other side, one by one, packed into one row, or in a different order."""

FAMILY = ["llama", "qwen3", "gpt2"]
TARGET = [{"batch": "right"}, {"batch": "separate"}, {"order": "reversed"}, {"order": "reversed", "batch": "separate"}]
