"""The loss is scaled for float16, but the gradients are not unscaled."""

PATCHES = "trainer"
EXPECT = ["lm_head", ""]
VISIBILITY = "strong"
CAUSE = r"\b8 × baseline"
BOTH = {"train": True, "schedule": "whole", "optimizer": "sgd"}
TARGET = [{}, {"dtype": "bfloat16", "master": True}]


def patch(trainer):
    loss = trainer.loss
    trainer.loss = lambda logits, labels: 8 * loss(logits, labels)
