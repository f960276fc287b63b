"""The latent from which keys and values are computed is not normalized."""

from benchmarks.verdict.tools import around

FAMILY = "deepseek-v3"
EXPECT = "model.layers.1.self_attn.kv_a_layernorm"
VISIBILITY = "strong"
CAUSE = r"its own input|did nothing|not normalised|skipped"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    around(model.model.layers[1].self_attn.kv_a_layernorm, lambda forward, x: x)
