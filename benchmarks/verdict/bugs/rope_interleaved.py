"""Rotary embedding rotates adjacent pairs although the weights are laid out in halves."""

from unittest import mock

import torch

from benchmarks.verdict.families import modeling

EXPECT = "model.layers.0.self_attn"
VISIBILITY = "strong"
CAUSE = r"interleaved|layout|pairs"
TARGET = [{}, {"dtype": "bfloat16"}]


def interleaved(q, k, cos, sin, unsqueeze_dim=1):
    def turned(x):
        even, odd = x[..., 0::2], x[..., 1::2]
        c, s = (t[..., : t.shape[-1] // 2].unsqueeze(unsqueeze_dim) for t in (cos, sin))
        return torch.stack((even * c - odd * s, even * s + odd * c), dim=-1).flatten(-2)

    return turned(q), turned(k)


def patch(model):
    return mock.patch.object(modeling("llama"), "apply_rotary_pos_emb", interleaved)
