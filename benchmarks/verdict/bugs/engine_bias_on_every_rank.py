"""A row-parallel layer adds its bias on both ranks."""

from benchmarks.verdict.tools import after

PATCHES = "engine"
FAMILY = "llama-bias"
EXPECT = "model.layers.1.self_attn.o_proj"
VISIBILITY = "strong"
CAUSE = r"separate offset per channel"
BOTH = {"tp": 2}
BASELINE = [{}, {"framework": "transformers", "tp": 1}]
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    projection = model.model.layers[1].self_attn.o_proj
    after(projection, lambda output: output + projection.bias)
