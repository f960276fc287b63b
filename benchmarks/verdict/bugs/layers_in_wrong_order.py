"""Layers 1 and 2 run in swapped order."""

PATCHES = "checkpoint"
EXPECT = "model.layers.1.input_layernorm"
VISIBILITY = "strong"
CAUSE = r"weight of .*layers\.2\.|layers\.2\."
TARGET = [{}, {"framework": "engine", "dtype": "bfloat16"}]


def patch(weights):
    for name in [n for n in weights if ".layers.1." in n]:
        other = name.replace(".layers.1.", ".layers.2.")
        weights[name], weights[other] = weights[other], weights[name]
