"""One MLP uses GELU instead of SiLU."""

import torch

from benchmarks.verdict.tools import around

EXPECT = "model.layers.1.mlp.act_fn"
VISIBILITY = "strong"
CAUSE = r"gelu.*silu"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    around(model.model.layers[1].mlp.act_fn, lambda forward, x: torch.nn.functional.gelu(x))
