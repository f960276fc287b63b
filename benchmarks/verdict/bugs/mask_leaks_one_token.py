"""In one layer, the sixth token attends to the seventh."""

from benchmarks.verdict.tools import around

FAMILY = ["llama", "gemma2"]
MODEL = {"num_hidden_layers": 5, "seed": 3}
BOTH = {"schedule": "whole", "batch": "right"}
TARGET = [{}, {"dtype": "bfloat16"}]
EXPECT = "model.layers.3.self_attn"
VISIBILITY = "strong"
CAUSE = r"next token too"
WHERE = {"position": 5}


def patch(model):
    def call(forward, *args, attention_mask=None, **kwargs):
        mask = attention_mask.clone()
        mask[..., 5, 6] = 0
        return forward(*args, attention_mask=mask, **kwargs)

    around(model.model.layers[3].self_attn, call)
