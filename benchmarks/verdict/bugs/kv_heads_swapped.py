"""The two key heads of one layer are swapped in the checkpoint."""

PATCHES = "checkpoint"
EXPECT = "model.layers.1.self_attn.k_proj"
VISIBILITY = "strong"
CAUSE = r"swapped"
TARGET = [{}, {"dtype": "bfloat16"}, {"framework": "engine", "tp": 2, "dtype": "bfloat16"}]


def patch(weights):
    name = "model.layers.1.self_attn.k_proj.weight"
    weights[name] = weights[name].roll(16, dims=0)
