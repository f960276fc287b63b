"""transformers on a CPU against the engine on a GPU."""

FAMILY = ["llama", "llama-deep", "qwen3", "qwen3-moe", "mixtral", "gemma2", "deepseek-v3"]
TARGET = [
    {"framework": "engine", "device": "cuda"},
    {"framework": "engine", "device": "cuda", "dtype": "bfloat16"},
]
