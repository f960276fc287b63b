"""One layer of Megatron scales its scores by 1/d instead of 1/sqrt(d)."""

PATCHES = "megatron"
FAMILY = ["llama", "qwen2"]
EXPECT = ["model.layers.1.self_attn", "model.layers.1.self_attn.core_attention"]
VISIBILITY = "strong"
CAUSE = r"scores? .*(0\.25|1/d|head_dim|1 / 16|0\.0625)|scal(e|ing) .*(0\.25|0\.0625|head_dim)"
BASELINE = {"framework": "transformers"}
TARGET = [{}, {"tp": 2, "dtype": "bfloat16"}]


def patch(model):
    attention = model.decoder.layers[1].self_attention.core_attention
    attention.softmax_scale = attention.softmax_scale**2
