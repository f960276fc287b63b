"""Padding is not masked: real tokens attend to it."""

from benchmarks.verdict.tools import around

EXPECT = "model"
VISIBILITY = "strong"
CAUSE = r"padding|mask"
WHERE = {"step": 0}
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    around(model.model, lambda forward, *args, attention_mask, **kwargs: forward(*args, attention_mask=None, **kwargs))
