"""One layer scales its scores by 1/d instead of 1/sqrt(d)."""

FAMILY = ["llama", "qwen3"]
EXPECT = "model.layers.1.self_attn"
VISIBILITY = "strong"
CAUSE = r"scores? .*(0\.25|head_dim|1 / 16|0\.0625|0\.1768|0\.03125)|scal(e|ing) .*(0\.25|0\.0625|head_dim|0\.03125)"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    attention = model.model.layers[1].self_attn
    attention.scaling = 1.0 / attention.head_dim
