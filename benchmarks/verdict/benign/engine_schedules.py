"""The engine with and without its prefix cache: different ranks, dtype, and chunk size."""

PATCHES = "engine"
FAMILY = ["llama", "qwen3"]
MODEL = {"num_hidden_layers": 6, "seed": 62}
BOTH = [{"page_size": 4}, {"page_size": 4, "workload": "shared", "engine": {"prefix_cache": True}}]
TARGET = [{"tp": 2}, {"dtype": "bfloat16"}]
