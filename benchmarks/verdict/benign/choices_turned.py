"""Near ties in DeepSeek-V3's expert selection, decided by a bias and groups: other requests, a different order."""

FAMILY = "deepseek-v3"
BOTH = [{"seed": 3}, {"seed": 5}]
TARGET = [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "order": "reversed"}]
