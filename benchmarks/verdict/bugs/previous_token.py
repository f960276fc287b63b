"""In decode, the model is fed the token before the last one."""

from benchmarks.verdict.tools import around

EXPECT = "model"
VISIBILITY = "strong"
CAUSE = r"1 token earlier|step before|previous|shifted by \+1"
WHERE = {"step": 2}


def patch(model):
    seen = []

    def call(forward, *args, input_ids, **kwargs):
        if input_ids.shape[1] == 1:
            seen.append(input_ids)
            input_ids = seen[-2] if len(seen) > 1 else input_ids
        return forward(*args, input_ids=input_ids, **kwargs)

    around(model.model, call)
