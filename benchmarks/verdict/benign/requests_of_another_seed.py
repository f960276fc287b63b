"""Other tokens on both sides, a different dtype on one side."""

FAMILY = ["llama", "qwen3"]
BOTH = [{"seed": 1}, {"seed": 2, "workload": "long"}, {"seed": 3, "workload": "one"}]
TARGET = {"dtype": "bfloat16"}
