"""Gradients of the previous step are not cleared."""

PATCHES = "trainer"
EXPECT = [
    "model.embed_tokens",
    "model.layers.0.self_attn.*",
]  # in bfloat16, the first with a move larger than its rounding
VISIBILITY = "strong"
CAUSE = r"step before|previous step|not zeroed|accumulat|last step"
WHERE = {"step": 1}
BOTH = {"train": True, "schedule": "whole", "optimizer": "adamw"}
TARGET = [{}, {"dtype": "bfloat16", "master": True}]


def patch(trainer):
    trainer.zero_grad = lambda: None
