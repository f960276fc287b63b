"""All requests packed in one row, separated by their positions, against a padded batch."""

FAMILY = ["llama", "qwen2", "qwen3"]
BOTH = {"schedule": "whole"}
TARGET = [{"batch": "packed"}, {"batch": "packed", "attention": "sdpa"}, {"batch": "packed", "dtype": "bfloat16"}]
