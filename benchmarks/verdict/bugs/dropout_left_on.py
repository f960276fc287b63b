"""Dropout in one attention layer is active during inference."""

EXPECT = "model.layers.1.self_attn"
VISIBILITY = "strong"
CAUSE = r"dropout"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    attention = model.model.layers[1].self_attn
    attention.attention_dropout, attention.training = 0.1, True
