"""One layer clips the output of its attention at 2, as a saturating cast does."""

from benchmarks.verdict.tools import after

EXPECT = "model.layers.2.self_attn.o_proj"
VISIBILITY = "subtle"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    after(model.model.layers[2].self_attn.o_proj, lambda output: output.clamp(-2.0, 2.0))
