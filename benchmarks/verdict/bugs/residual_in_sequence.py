"""A layer with parallel attention and MLP runs them sequentially."""

FAMILY = "gpt-neox"
EXPECT = ["gpt_neox.layers.1", "gpt_neox.layers.1.post_attention_layernorm"]
VISIBILITY = "strong"
CAUSE = r"added once more|left out|missing"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    model.gpt_neox.layers[1].use_parallel_residual = False
