"""The norm after an MLP is skipped."""

from benchmarks.verdict.tools import around

FAMILY = "olmo2"
EXPECT = "model.layers.1.post_feedforward_layernorm"
VISIBILITY = "strong"
CAUSE = r"its own input|did nothing|skipped"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    around(model.model.layers[1].post_feedforward_layernorm, lambda forward, x: x)
