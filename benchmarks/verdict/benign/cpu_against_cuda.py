"""The same checkpoint on a CPU and on a GPU."""

FAMILY = ["llama", "llama-deep", "qwen3", "qwen3-moe", "mixtral", "gemma2", "gpt2", "deepseek-v3"]
TARGET = [{"device": "cuda"}, {"device": "cuda", "dtype": "float16"}, {"device": "cuda", "schedule": "whole"}]
