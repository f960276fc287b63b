"""Gradients are not clipped."""

PATCHES = "trainer"
EXPECT = [
    "model.embed_tokens",
    "model.layers.0.self_attn.*",
]  # in bfloat16, the first with a move larger than its rounding
VISIBILITY = "strong"
CAUSE = r"not clipped"
BOTH = [
    {"train": True, "schedule": "whole", "optimizer": "adamw"},
    {"train": True, "schedule": "whole", "optimizer": "sgd"},
]
TARGET = [{}, {"dtype": "bfloat16", "master": True}]


def patch(trainer):
    trainer.clip = lambda: None
