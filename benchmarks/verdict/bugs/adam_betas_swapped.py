"""Adam's betas are swapped; bias correction hides it in the first step."""

PATCHES = "trainer"
EXPECT = "model.embed_tokens"
VISIBILITY = "strong"
CAUSE = r"betas are swapped"
WHERE = {"step": 1}
BOTH = {"train": True, "schedule": "whole", "optimizer": "adamw"}


def patch(trainer):
    for group in trainer.optimizer.param_groups:
        group["betas"] = group["betas"][::-1]
