"""Key and value projections of one layer are swapped in the checkpoint."""

PATCHES = "checkpoint"
FAMILY = ["llama", "llama-tied"]
EXPECT = "model.layers.2.self_attn.k_proj"
VISIBILITY = "strong"
CAUSE = r"baseline of .*v_proj"
TARGET = [{}, {"framework": "engine", "tp": 2, "dtype": "bfloat16"}, {"framework": "megatron", "tp": 2}]


def patch(weights):
    k, v = (f"model.layers.2.self_attn.{name}_proj.weight" for name in "kv")
    weights[k], weights[v] = weights[v], weights[k]
