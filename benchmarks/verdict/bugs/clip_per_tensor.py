"""Each gradient is clipped by its own norm, as a rank does that was not told the others'."""

import torch

PATCHES = "trainer"
EXPECT = [
    "model.embed_tokens",
    "model.layers.0.self_attn.*",
]  # in bfloat16 the first that moved further than it is rounded
VISIBILITY = "strong"
CAUSE = r"own norm"
BOTH = {"train": True, "schedule": "whole", "optimizer": "sgd"}
TARGET = [{}, {"dtype": "bfloat16", "master": True}]


def patch(trainer):
    def clip():
        for p in trainer.parameters:
            torch.nn.utils.clip_grad_norm_([p], 1.0)

    trainer.clip = clip
