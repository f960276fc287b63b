"""The router of one layer computes its logits in bfloat16."""

import torch

from benchmarks.verdict.tools import around

FAMILY = ["mixtral", "qwen3-moe"]
EXPECT = "model.layers.1.mlp.gate"
VISIBILITY = "subtle"


def patch(model):
    gate = model.model.layers[1].mlp.gate

    def call(forward, hidden):
        with torch.autocast(hidden.device.type, torch.bfloat16):
            return tuple(x.float() if x.is_floating_point() else x for x in forward(hidden))

    around(gate, call)
