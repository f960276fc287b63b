"""Gradients of one layer's experts are divided by the number of expert-parallel ranks, before clipping."""

FAMILY = "mixtral"
PATCHES = "trainer"
EXPECT = "model.layers.1.mlp.experts"
VISIBILITY = "strong"
CAUSE = r"0\.5|/ 2|half"
BOTH = {"train": True, "schedule": "whole", "optimizer": "adamw", "micros": 2}
TARGET = [{}, {"dtype": "bfloat16", "master": True}]


def patch(trainer):
    for parameter in trainer.model.model.layers[1].mlp.experts.parameters():
        parameter.register_hook(lambda gradient: gradient / 2)
