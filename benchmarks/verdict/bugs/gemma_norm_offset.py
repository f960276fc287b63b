"""One norm of Gemma multiplies by its weight instead of one plus its weight."""

FAMILY = "gemma2"
EXPECT = "model.layers.2.pre_feedforward_layernorm"
VISIBILITY = "strong"
CAUSE = r"1 \+ w"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    model.model.layers[2].pre_feedforward_layernorm.weight.data -= 1.0
