"""Gradients of all microbatches but the last are discarded."""

PATCHES = "trainer"
EXPECT = [
    "model.embed_tokens",
    "model.layers.0.self_attn.*",
]  # in bfloat16, the first with a move larger than its rounding
VISIBILITY = "strong"
CAUSE = [r"last micro-?batch", r"gradients? of .*micro-?batch(es)? .*(lost|missing)"]
BOTH = {"train": True, "schedule": "whole", "optimizer": "sgd", "micros": 2}
TARGET = [{}, {"dtype": "bfloat16", "master": True}]


def patch(trainer):
    trainer.model.register_forward_pre_hook(lambda *_: trainer.zero_grad())
