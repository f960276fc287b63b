"""The engine on two ranks against one; with biases, and as real processes."""

PATCHES = "engine"
FAMILY = ["llama", "llama-bias", "llama-deep"]
TARGET = [{"tp": 2}, {"tp": 2, "dtype": "bfloat16"}]
