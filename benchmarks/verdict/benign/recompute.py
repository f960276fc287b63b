"""All tokens in one forward without a cache against prefill and decoding."""

FAMILY = ["llama", "qwen3", "gemma2", "gpt2"]
BASELINE = {"schedule": "whole"}
TARGET = [{}, {"dtype": "bfloat16"}]
