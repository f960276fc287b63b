"""SGD with Nesterov's momentum, which was not requested: every parameter is off."""

PATCHES = "trainer"
EXPECT = "model.embed_tokens"
VISIBILITY = "strong"
CAUSE = r"nesterov"
BOTH = {"train": True, "schedule": "whole", "optimizer": "sgd"}


def patch(trainer):
    for group in trainer.optimizer.param_groups:
        group["nesterov"] = True
