"""Near ties of the routers in some of eight requests, in 16 bits."""

FAMILY = ["gpt-oss", "mixtral", "qwen3-moe"]
MODEL = [{"seed": 2, "weights": "normal"}, {"seed": 4, "weights": "wide"}]
TARGET = {"dtype": "bfloat16"}
BOTH = {"workload": "many"}
