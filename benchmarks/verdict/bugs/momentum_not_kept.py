"""Momentum is reset after every step."""

PATCHES = "trainer"
EXPECT = [
    "model.embed_tokens",
    "model.layers.0.self_attn.*",
]  # in bfloat16, the first with a move larger than its rounding
VISIBILITY = "strong"
CAUSE = r"momentum is not kept"
WHERE = {"step": 1}
BOTH = {"train": True, "schedule": "whole", "optimizer": "sgd"}
TARGET = [{}, {"attention": "sdpa"}]


def patch(trainer):
    trainer.optimizer.register_step_post_hook(lambda optimizer, args, kwargs: optimizer.state.clear())
