"""One layer of Megatron scales its scores by 1/d instead of 1/sqrt(d)."""

PATCHES = "megatron"
FAMILY = ["llama", "qwen2"]
EXPECT = ["model.layers.1.self_attn", "model.layers.1.self_attn.core_attention"]
VISIBILITY = "strong"
BASELINE = {"framework": "transformers"}
TARGET = [{}, {"tp": 2, "dtype": "bfloat16"}]


def patch(model):
    attention = model.decoder.layers[1].self_attention.core_attention
    attention.softmax_scale = attention.softmax_scale**2
