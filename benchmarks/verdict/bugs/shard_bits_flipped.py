"""Eight adjacent weights of one up projection are corrupted."""

PATCHES = "checkpoint"
EXPECT = "model.layers.1.mlp.up_proj"
VISIBILITY = "subtle"
TARGET = [{}, {"framework": "engine", "tp": 2}]


def patch(weights):
    weights["model.layers.1.mlp.up_proj.weight"][101, 8:16] *= -1.0
