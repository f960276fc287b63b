"""Right-padded transformers with SDPA in bfloat16 against the engine's packed rows in bfloat16."""

FAMILY = ["llama", "llama-tied"]
BOTH = {"dtype": "bfloat16"}
BASELINE = {"attention": "sdpa", "batch": "right"}
TARGET = [{"framework": "engine"}, {"framework": "engine", "tp": 2}]
