"""Rotary frequencies use theta 500,000 instead of 10,000."""

import torch

EXPECT = "model.rotary_emb"
VISIBILITY = "strong"
CAUSE = r"theta 500,?000|theta 5e\+?05|theta (4\.99\d|5)e\+?05|theta 499,?9\d\d"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    inv_freq = model.model.rotary_emb.inv_freq
    inv_freq.copy_(500000.0 ** -(torch.arange(len(inv_freq)) / len(inv_freq)))
