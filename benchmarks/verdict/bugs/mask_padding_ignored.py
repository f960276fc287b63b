"""Padding is not masked: real tokens attend to it."""

from benchmarks.verdict.tools import around

EXPECT = "model"
VISIBILITY = "strong"
CAUSE = r"mask shows .*padding|lets padding be seen"
WHERE = {"step": 0}
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    around(model.model, lambda forward, *args, attention_mask, **kwargs: forward(*args, attention_mask=None, **kwargs))
