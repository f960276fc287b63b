"""Adam's epsilon is 1e-4 instead of 1e-8, as large as small gradients."""

PATCHES = "trainer"
EXPECT = "model.embed_tokens"
VISIBILITY = "subtle"
BOTH = {"train": True, "schedule": "whole", "optimizer": "adamw"}
TARGET = [{}, {"attention": "sdpa"}]


def patch(trainer):
    for group in trainer.optimizer.param_groups:
        group["eps"] = 1e-4
