"""One layer scales its scores by 1/d instead of 1/sqrt(d)."""

FAMILY = ["llama", "qwen3"]
EXPECT = "model.layers.1.self_attn"
VISIBILITY = "strong"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    attention = model.model.layers[1].self_attn
    attention.scaling = 1.0 / attention.head_dim
