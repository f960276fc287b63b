"""The rows of one fused qkv weight are ordered q, k, v instead of group by group."""

import torch

PATCHES = "megatron"
EXPECT = ["model.layers.1.self_attn.q_proj", "decoder.layers.1.self_attention.linear_qkv"]
VISIBILITY = "strong"
CAUSE = r"blocks of \d+ columns in the order"
BASELINE = [{"framework": "transformers"}, {}]


def patch(model):
    weight = model.decoder.layers[1].self_attention.linear_qkv.weight
    q, k, v = weight.data.view(2, 64, -1).split((32, 16, 16), dim=1)
    weight.data.copy_(torch.cat([part.flatten(0, 1) for part in (q, k, v)]))
