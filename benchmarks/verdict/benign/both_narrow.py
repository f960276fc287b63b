"""Both sides in one narrow dtype, by different attention kernels."""

FAMILY = ["llama", "qwen2"]
BOTH = [{"dtype": "bfloat16"}, {"dtype": "float16"}]
TARGET = [{"attention": "sdpa"}, {"batch": "right"}]
