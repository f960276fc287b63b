"""More architectures, in 16 bits or without padding."""

FAMILY = ["deepseek-v3", "olmo2", "gpt-neox", "phi3", "qwen2-moe", "llama4"]
TARGET = [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"batch": "separate"}]
