"""The bias of one key projection is not loaded."""

FAMILY = "qwen2"
EXPECT = "model.layers.1.self_attn.k_proj"
VISIBILITY = "strong"
CAUSE = r"separate offset per channel"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    model.model.layers[1].self_attn.k_proj.bias.data.zero_()
