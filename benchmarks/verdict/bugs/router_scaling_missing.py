"""routed_scaling_factor is not applied."""

FAMILY = "deepseek-v3"
EXPECT = "model.layers.1.mlp.gate"
VISIBILITY = "strong"
CAUSE = r"0\.6667 × baseline's: the scaling factor 1\.5 is missing"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    model.model.layers[1].mlp.gate.routed_scaling_factor = 1.0
