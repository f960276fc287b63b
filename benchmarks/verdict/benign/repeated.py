"""Nothing changes: the same run again."""

FAMILY = ["llama", "gemma2", "gpt2", "qwen3-moe", "mixtral"]
