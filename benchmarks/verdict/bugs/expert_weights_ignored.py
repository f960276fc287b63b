"""The experts of one layer are averaged instead of weighted by the router."""

import torch

from benchmarks.verdict.tools import around

FAMILY = "mixtral"
EXPECT = "model.layers.2.mlp.experts"
VISIBILITY = "strong"
CAUSE = r"(equal|same|ignored|averaged|mean|1/2|0\.5).*weight|weights? .*(equal|same|ignored|averaged|1/2|0\.5)|averag"


def patch(model):
    def call(forward, hidden, index, weights):
        return forward(hidden, index, torch.full_like(weights, 0.5))

    around(model.model.layers[2].mlp.experts, call)
