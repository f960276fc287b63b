"""Each gradient is clipped by its own norm, as on a rank that does not know the norms of others."""

import torch

PATCHES = "trainer"
EXPECT = [
    "model.embed_tokens",
    "model.layers.0.self_attn.*",
]  # in bfloat16, the first with a move larger than its rounding
VISIBILITY = "strong"
CAUSE = r"own norm"
BOTH = {"train": True, "schedule": "whole", "optimizer": "sgd"}
TARGET = [{}, {"dtype": "bfloat16", "master": True}]


def patch(trainer):
    def clip():
        for p in trainer.parameters:
            torch.nn.utils.clip_grad_norm_([p], 1.0)

    trainer.clip = clip
