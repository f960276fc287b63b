"""The bias of one value projection is added twice."""

from benchmarks.verdict.tools import after

FAMILY = "qwen2"
EXPECT = "model.layers.1.self_attn.v_proj"
VISIBILITY = "strong"
CAUSE = r"separate offset per channel"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    projection = model.model.layers[1].self_attn.v_proj
    after(projection, lambda output: output + projection.bias)
