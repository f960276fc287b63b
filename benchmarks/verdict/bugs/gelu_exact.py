"""GPT-2 uses exact GELU instead of its tanh approximation."""

import torch

from benchmarks.verdict.tools import around

FAMILY = "gpt2"
EXPECT = "transformer.h.0.mlp.act"
VISIBILITY = "subtle"


def patch(model):
    for block in model.transformer.h:
        around(block.mlp.act, lambda forward, x: torch.nn.functional.gelu(x))
