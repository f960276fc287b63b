"""A square weight is stored transposed."""

PATCHES = "checkpoint"
EXPECT = "model.layers.1.self_attn.o_proj"
VISIBILITY = "strong"
CAUSE = r"weight .*transposed"
TARGET = [{}, {"framework": "engine", "tp": 2, "dtype": "bfloat16"}]


def patch(weights):
    name = "model.layers.1.self_attn.o_proj.weight"
    weights[name] = weights[name].T
