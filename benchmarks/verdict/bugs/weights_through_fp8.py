"""The weights of one projection were rounded to float8 without a scale."""

import torch

EXPECT = "model.layers.2.self_attn.o_proj"
VISIBILITY = "strong"
CAUSE = r"fp8|float8|e5m2"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    weight = model.model.layers[2].self_attn.o_proj.weight
    weight.data = weight.data.to(torch.float8_e5m2).to(weight.dtype)
