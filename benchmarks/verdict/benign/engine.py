"""transformers against the engine."""

FAMILY = ["llama", "llama-tied", "llama3", "llama-deep"]
TARGET = [{"framework": "engine"}, {"framework": "engine", "dtype": "bfloat16"}]
