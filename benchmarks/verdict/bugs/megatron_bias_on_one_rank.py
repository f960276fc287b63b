"""Rank 1 does not load the key bias of one layer."""

PATCHES = "megatron"
FAMILY = "qwen2"
EXPECT = ["model.layers.1.self_attn.k_proj", "decoder.layers.1.self_attention.linear_qkv"]
VISIBILITY = "strong"
CAUSE = r"separate offset per channel"
WHERE = {"rank": 1}
BASELINE = [{"framework": "transformers"}, {}]
TARGET = [{"tp": 2}, {"tp": 2, "dtype": "bfloat16"}]


def patch(model):
    import torch

    if torch.distributed.get_rank() == 1:
        model.decoder.layers[1].self_attention.linear_qkv.bias.data[32:48] = 0  # [q q | k | v] of its one group
