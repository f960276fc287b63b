"""The same model in a narrower dtype."""

FAMILY = ["llama", "llama-tied", "llama3", "llama-deep", "qwen2", "qwen3", "gemma2", "gpt2", "qwen3-moe", "mixtral"]
TARGET = [{"dtype": "bfloat16"}, {"dtype": "float16"}]
