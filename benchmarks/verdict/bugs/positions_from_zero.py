"""Left padding is ignored: positions count from the start of the padded row."""

import torch

from benchmarks.verdict.tools import around

EXPECT = "model"
VISIBILITY = "strong"
CAUSE = r"padd|shift|positions|offset"
WHERE = {"request": ["r1", "r2"]}
BOTH = {"schedule": "whole"}


def counted(forward, *args, position_ids, **kwargs):
    count = torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(position_ids)
    return forward(*args, position_ids=count, **kwargs)


def patch(model):
    around(model.model, counted)
