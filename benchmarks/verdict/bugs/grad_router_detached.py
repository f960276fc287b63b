"""The expert weights are detached, so the router does not learn."""

from benchmarks.verdict.tools import around

FAMILY = ["mixtral", "qwen2-moe"]
EXPECT = ["model.layers.1.mlp.gate", "model.layers.1.mlp.experts"]
VISIBILITY = "strong"
CAUSE = r"detached|no gradient|zero|only in baseline"
BOTH = {"train": True, "schedule": "whole"}
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    around(model.model.layers[1].mlp.experts, lambda forward, x, index, weights: forward(x, index, weights.detach()))
