"""Positions inside the model are one too high in decode."""

from benchmarks.verdict.tools import around

EXPECT = "model"
VISIBILITY = "strong"
CAUSE = r"1 (higher|more|later)|\+ ?1\b"
WHERE = {"step": 1}


def shifted(forward, *args, position_ids, **kwargs):
    return forward(*args, position_ids=position_ids + (position_ids.shape[1] == 1), **kwargs)


def patch(model):
    around(model.model, shifted)
