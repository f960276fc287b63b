"""Both sides store the KV cache in a narrower format than their compute dtype."""

PATCHES = "engine"
FAMILY = ["llama", "qwen3"]
MODEL = {"num_hidden_layers": 2}
BOTH = [{"engine": {"kv_cache_dtype": "fp8_e4m3"}}, {"engine": {"kv_cache_dtype": "bfloat16"}}]
TARGET = [{"tp": 2}, {"dtype": "bfloat16"}]
