"""One norm of a float32 model computes in bfloat16."""

import torch

from benchmarks.verdict.tools import around

FAMILY = ["llama", "gpt2"]
EXPECT = ["model.layers.2.post_attention_layernorm", "transformer.h.2.ln_2"]
VISIBILITY = "subtle"


def patch(model):
    layers = model.model.layers if hasattr(model, "model") else model.transformer.h
    norm = layers[2].post_attention_layernorm if hasattr(model, "model") else layers[2].ln_2

    def call(forward, hidden_states):
        weight = norm.weight.to(torch.bfloat16)
        wide = hidden_states.to(torch.bfloat16)
        if hasattr(norm, "bias"):
            bias = norm.bias.to(torch.bfloat16)
            return torch.nn.functional.layer_norm(wide, weight.shape, weight, bias, norm.eps).float()
        return (weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon)).float()

    around(norm, call)
