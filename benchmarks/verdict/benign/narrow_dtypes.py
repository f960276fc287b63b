"""bfloat16 against float16."""

FAMILY = ["llama", "qwen3"]
BASELINE = {"dtype": "bfloat16"}
TARGET = {"dtype": "float16"}
