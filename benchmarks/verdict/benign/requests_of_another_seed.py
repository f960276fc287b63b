"""Other tokens on both sides, in another dtype on one."""

FAMILY = ["llama", "qwen3"]
BOTH = [{"seed": 1}, {"seed": 2, "workload": "long"}, {"seed": 3, "workload": "one"}]
TARGET = {"dtype": "bfloat16"}
