"""Megatron-core on two ranks against one."""

PATCHES = "megatron"
TARGET = [{"tp": 2}, {"tp": 2, "dtype": "bfloat16"}, {"tp": 2, "sequence_parallel": True}]
