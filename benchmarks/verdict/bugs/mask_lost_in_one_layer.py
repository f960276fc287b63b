"""One layer attends without a mask."""

from benchmarks.verdict.tools import around

FAMILY = ["llama", "qwen3-moe"]
EXPECT = "model.layers.1.self_attn"
VISIBILITY = "strong"
CAUSE = r"mask is lost|mask (shows|hides) \d+ places? more"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    around(
        model.model.layers[1].self_attn,
        lambda forward, *args, attention_mask, **kwargs: forward(*args, attention_mask=None, **kwargs),
    )
