"""Both sides in the same 16-bit dtype, with different attention kernels."""

FAMILY = ["llama", "qwen2"]
BOTH = [{"dtype": "bfloat16"}, {"dtype": "float16"}]
TARGET = [{"attention": "sdpa"}, {"batch": "right"}]
