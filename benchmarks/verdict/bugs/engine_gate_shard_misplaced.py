"""Rank 1 splits its fused gate and up projection one column too late."""

PATCHES = "engine"
EXPECT = "model.layers.1.mlp.gate_proj"
VISIBILITY = "strong"
CAUSE = r"1 columns? (later|earlier)|rotated by|rows? .*(shift|roll)"
WHERE = {"rank": 1}
BOTH = {"tp": 2}
BASELINE = {"framework": "transformers", "tp": 1}
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    if model.tp.rank == 1:
        weight = model.model.layers[1].mlp.gate_up_proj.weight
        weight.copy_(weight.roll(-1, dims=0))
