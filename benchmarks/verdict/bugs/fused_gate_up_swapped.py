"""Gate and up are swapped in the fused weight of a checkpoint."""

import torch

FAMILY = "phi3"
PATCHES = "checkpoint"
EXPECT = "model.layers.1.mlp.gate_up_proj"
VISIBILITY = "strong"
CAUSE = r"halves .*swapped"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(weights):
    name = "model.layers.1.mlp.gate_up_proj.weight"
    gate, up = weights[name].chunk(2, 0)
    weights[name] = torch.cat([up, gate], 0)
