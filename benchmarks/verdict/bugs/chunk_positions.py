"""All prompt chunks but the first start one position too early."""

from benchmarks.verdict.tools import around

EXPECT = "model"
VISIBILITY = "strong"
CAUSE = r"1 (position )?(lower|less)|1 earlier|off by (-|−)1|(-|−) ?1\b|(−|-)1$|one lower"
TARGET = [{}, {"dtype": "bfloat16"}]
BOTH = {"schedule": "chunks"}
WHERE = {"step": 1}


def patch(model):
    def call(forward, *args, position_ids, **kwargs):
        if position_ids.shape[1] > 1 and position_ids.max() > 4:
            position_ids = (position_ids - 1).clamp(min=0)
        return forward(*args, position_ids=position_ids, **kwargs)

    around(model.model, call)
