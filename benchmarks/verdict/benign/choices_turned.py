"""Near ties of DeepSeek-V3's choices, which a bias and groups decide: other requests, another order."""

FAMILY = "deepseek-v3"
BOTH = [{"seed": 3}, {"seed": 5}]
TARGET = [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "order": "reversed"}]
