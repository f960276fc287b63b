"""The input gradient of one MLP is doubled, as by an extra all-reduce."""

from benchmarks.verdict.tools import around

EXPECT = "model.layers.1.mlp"
VISIBILITY = "strong"
CAUSE = r"\b2 × baseline"
BOTH = {"train": True, "schedule": "whole"}


def patch(model):
    def call(forward, x):
        return forward(x + (x - x.detach()))

    around(model.model.layers[1].mlp, call)
