"""The learning rate is that of the previous step."""

PATCHES = "trainer"
EXPECT = [
    "model.embed_tokens",
    "model.layers.0.self_attn.*",
]  # in bfloat16, the first with a move larger than its rounding
VISIBILITY = "strong"
CAUSE = r"learning rate is"
WHERE = {"step": 1}
BOTH = [
    {"train": True, "schedule": "whole", "optimizer": "adamw"},
    {"train": True, "schedule": "whole", "optimizer": "sgd"},
]
TARGET = [{}, {"attention": "sdpa"}]


def patch(trainer):
    trainer.scheduler.lr_lambdas = [lambda step: 1.0 / max(1, step)] * 2
