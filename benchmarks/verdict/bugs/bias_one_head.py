"""The bias of one query head out of four is not loaded."""

FAMILY = "qwen2"
EXPECT = "model.layers.2.self_attn.q_proj"
VISIBILITY = "subtle"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    model.model.layers[2].self_attn.q_proj.bias.data[16:32] = 0
