"""The experts of one layer are averaged instead of weighted by the router."""

import torch

from benchmarks.verdict.tools import around

FAMILY = "mixtral"
EXPECT = "model.layers.2.mlp.experts"
VISIBILITY = "strong"


def patch(model):
    def call(forward, hidden, index, weights):
        return forward(hidden, index, torch.full_like(weights, 0.5))

    around(model.model.layers[2].mlp.experts, call)
