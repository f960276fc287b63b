"""The weights of one projection of a float32 model were rounded to bfloat16."""

import torch

FAMILY = ["llama", "qwen2"]
EXPECT = "model.layers.1.mlp.gate_proj"
VISIBILITY = "subtle"


def patch(model):
    weight = model.model.layers[1].mlp.gate_proj.weight
    weight.data = weight.data.to(torch.bfloat16).float()
