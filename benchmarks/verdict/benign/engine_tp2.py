"""transformers against the engine on two ranks."""

FAMILY = ["llama", "llama-tied", "llama-deep"]
TARGET = [{"framework": "engine", "tp": 2}, {"framework": "engine", "tp": 2, "dtype": "bfloat16"}]
