"""Layer 2 is loaded from the weights of layer 1."""

PATCHES = "checkpoint"
EXPECT = "model.layers.2.input_layernorm"
VISIBILITY = "strong"
CAUSE = r"weight of .*layers\.1\.|layers\.1\."
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(weights):
    for name in [n for n in weights if ".layers.2." in n]:
        weights[name] = weights[name.replace(".layers.2.", ".layers.1.")]
