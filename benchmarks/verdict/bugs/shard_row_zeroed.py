"""One row of one down projection is zero in the checkpoint."""

PATCHES = "checkpoint"
EXPECT = "model.layers.2.mlp.down_proj"
VISIBILITY = "strong"
CAUSE = r"column 17.*zero"
TARGET = [{}, {"dtype": "bfloat16"}, {"framework": "engine", "tp": 2, "dtype": "bfloat16"}]


def patch(weights):
    weights["model.layers.2.mlp.down_proj.weight"][17] = 0
