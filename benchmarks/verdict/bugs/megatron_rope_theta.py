"""Megatron's rotary frequencies use theta 5,000 instead of 10,000."""

import torch

PATCHES = "megatron"
EXPECT = ["rotary_pos_emb", "model.layers.0.self_attn"]  # transformers has other tables: their first user shows it
VISIBILITY = "strong"
CAUSE = r"theta 5,?0\d\d|5,?000|4,?9\d\d"
BASELINE = [{}, {"framework": "transformers"}]
TARGET = [{}, {"tp": 2}]


def patch(model):
    inv_freq = model.rotary_pos_emb.inv_freq
    model.rotary_pos_emb.inv_freq = 5000.0 ** -(torch.arange(len(inv_freq)) / len(inv_freq))
