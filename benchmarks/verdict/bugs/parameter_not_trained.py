"""One parameter was left out of the optimizer."""

PATCHES = "trainer"
EXPECT = "model.layers.2.mlp.up_proj"
VISIBILITY = "strong"
CAUSE = r"not (updated|trained|changed)|unchanged|step before|never moved"
BOTH = {"train": True, "schedule": "whole", "optimizer": "adamw"}
TARGET = [{}, {"dtype": "bfloat16", "master": True}]


def patch(trainer):
    forgotten = trainer.masters[[p is wanted(trainer) for p in trainer.parameters].index(True)]
    for group in trainer.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not forgotten]


def wanted(trainer):
    return trainer.model.model.layers[2].mlp.up_proj.weight
