"""A quantization scale is off: one output channel of one projection is 4 percent too large."""

EXPECT = "model.layers.1.mlp.up_proj"
VISIBILITY = "subtle"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    model.model.layers[1].mlp.up_proj.weight.data[33] *= 1.04
