"""q, k, v and gate, up as one linear layer each, with vLLM's names."""

FAMILY = ["llama", "qwen2"]
TARGET = [{"fused": True}, {"fused": True, "dtype": "bfloat16"}]
