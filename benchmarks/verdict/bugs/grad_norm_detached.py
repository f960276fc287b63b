"""The backward of one norm treats the variance as a constant."""

from benchmarks.verdict.tools import around

EXPECT = "model.layers.2.post_attention_layernorm"
VISIBILITY = "strong"
CAUSE = r"variance|constant|detached|statistic|linear"
BOTH = {"train": True, "schedule": "whole"}


def patch(model):
    import torch

    norm = model.model.layers[2].post_attention_layernorm

    def call(forward, hidden):
        scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        return norm.weight * (hidden * scale.detach())

    around(norm, call)
