"""The frequency scaling of Llama 3.1 is ignored."""

import torch

FAMILY = "llama3"
EXPECT = "model.rotary_emb"
VISIBILITY = "strong"
CAUSE = r"scaling"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    inv_freq = model.model.rotary_emb.inv_freq
    inv_freq.copy_(10000.0 ** -(torch.arange(len(inv_freq)) / len(inv_freq)))
