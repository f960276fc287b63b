"""The loss of a microbatch is not divided by the number of microbatches."""

PATCHES = "trainer"
EXPECT = ["lm_head", ""]
VISIBILITY = "strong"
CAUSE = r"\b2 × baseline"
BOTH = {"train": True, "schedule": "whole", "optimizer": "sgd", "micros": 2}
TARGET = [{}, {"dtype": "bfloat16", "master": True}]


def patch(trainer):
    loss = trainer.loss
    trainer.loss = lambda logits, labels: loss(logits, labels) * trainer.num_micros
