"""Weight decay is applied to norms and biases too."""

PATCHES = "trainer"
EXPECT = "model.layers.0.*layernorm"
VISIBILITY = "subtle"
BOTH = {"train": True, "schedule": "whole", "optimizer": "adamw"}
TARGET = [{}, {"update": "fused"}]


def patch(trainer):
    for group in trainer.optimizer.param_groups:
        group["weight_decay"] = 0.1
