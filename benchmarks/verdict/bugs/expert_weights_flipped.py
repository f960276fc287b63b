"""The weights of a token's experts are in reverse order."""

from benchmarks.verdict.tools import around

FAMILY = ["qwen3-moe", "qwen2-moe"]
EXPECT = "model.layers.1.mlp.experts"
VISIBILITY = "strong"
CAUSE = r"weights? .*(revers|other order|flipped|swapped|exchanged)"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    around(model.model.layers[1].mlp.experts, lambda forward, x, chosen, weights: forward(x, chosen, weights.flip(-1)))
