"""In decode, one layer attends only to the last eight cached tokens."""

from benchmarks.verdict.tools import around

EXPECT = "model.layers.1.self_attn"
VISIBILITY = "strong"
CAUSE = r"window .*8|last 8|8 (newest|last)"
TARGET = [{}, {"dtype": "bfloat16"}]
WHERE = {"step": 1}


def patch(model):
    import torch

    def call(forward, *args, attention_mask, **kwargs):
        if attention_mask.shape[-2] == 1:
            attention_mask = attention_mask.clone()
            attention_mask[..., :-8] = torch.finfo(attention_mask.dtype).min
        return forward(*args, attention_mask=attention_mask, **kwargs)

    around(model.model.layers[1].self_attn, call)
