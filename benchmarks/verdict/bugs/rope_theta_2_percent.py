"""Rotary frequencies use theta 10,200 instead of 10,000."""

import torch

FAMILY = ["llama", "qwen3"]
EXPECT = "model.rotary_emb"
VISIBILITY = "subtle"


def patch(model):
    inv_freq = model.model.rotary_emb.inv_freq
    inv_freq.mul_((10200 / 10000) ** -(torch.arange(len(inv_freq), device=inv_freq.device) / len(inv_freq)))
