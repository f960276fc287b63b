"""Gradients of all micro-batches but the last are thrown away."""

PATCHES = "trainer"
EXPECT = [
    "model.embed_tokens",
    "model.layers.0.self_attn.*",
]  # in bfloat16 the first that moved further than it is rounded
VISIBILITY = "strong"
CAUSE = [r"last micro-?batch", r"gradients? of .*micro-?batch(es)? .*(lost|missing)"]
BOTH = {"train": True, "schedule": "whole", "optimizer": "sgd", "micros": 2}
TARGET = [{}, {"dtype": "bfloat16", "master": True}]


def patch(trainer):
    trainer.model.register_forward_pre_hook(lambda *_: trainer.zero_grad())
