"""Gate and up projections of one layer are swapped in the checkpoint."""

PATCHES = "checkpoint"
EXPECT = "model.layers.2.mlp.gate_proj"
VISIBILITY = "strong"
CAUSE = r"baseline of .*up_proj|halves .*swapped"
TARGET = [{}, {"framework": "engine", "dtype": "bfloat16"}]


def patch(weights):
    gate, up = (f"model.layers.2.mlp.{name}_proj.weight" for name in ("gate", "up"))
    weights[gate], weights[up] = weights[up], weights[gate]
