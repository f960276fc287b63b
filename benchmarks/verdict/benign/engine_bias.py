"""transformers against the engine, for a model with biases everywhere."""

FAMILY = "llama-bias"
TARGET = [{"framework": "engine", "tp": 2}, {"framework": "engine", "tp": 2, "dtype": "bfloat16"}]
