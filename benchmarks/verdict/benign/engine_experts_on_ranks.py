"""Experts sharded over ranks (EP), against transformers and against one rank."""

PATCHES = "engine"
FAMILY = ["mixtral", "qwen3-moe"]
BASELINE = [{"framework": "transformers"}, {}]
TARGET = [{"tp": 2, "engine": {"ep": 2}}, {"tp": 2, "dtype": "bfloat16", "engine": {"ep": 2}}]
