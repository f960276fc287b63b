"""The norm of the keys of one layer is taken over all heads together."""

import torch

from benchmarks.verdict.tools import around

FAMILY = "qwen3"
EXPECT = "model.layers.2.self_attn.k_norm"
VISIBILITY = "strong"
CAUSE = r"all heads|whole row|over .*heads|separate factor per (token|head)|heads together"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    norm = model.model.layers[2].self_attn.k_norm

    def call(forward, hidden):
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean((-2, -1), keepdim=True) + norm.variance_epsilon)
        return norm.weight * (wide * scale).to(hidden.dtype)

    around(norm, call)
