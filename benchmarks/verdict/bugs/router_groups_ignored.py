"""A router admits all groups of experts."""

FAMILY = "deepseek-v3"
EXPECT = "model.layers.1.mlp.gate"
VISIBILITY = "strong"
CAUSE = r"admits all groups"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    model.model.layers[1].mlp.gate.topk_group = 4
