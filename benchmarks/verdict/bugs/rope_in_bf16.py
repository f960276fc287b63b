"""`model.to(bfloat16)` also rounds the rotary frequencies of a float32 model."""

import torch

EXPECT = "model.rotary_emb"
VISIBILITY = "subtle"


def patch(model):
    inv_freq = model.model.rotary_emb.inv_freq
    inv_freq.copy_(inv_freq.to(torch.bfloat16).float())
