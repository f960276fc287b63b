"""Multi-head latent attention rotates halves although the weights are laid out in pairs."""

from unittest import mock

from benchmarks.verdict.families import modeling

FAMILY = "deepseek-v3"
EXPECT = "model.layers.0.self_attn"
VISIBILITY = "strong"
CAUSE = r"interleaved|layout|pairs|halves"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    module = modeling("deepseek-v3")
    return mock.patch.object(module, "apply_rotary_pos_emb_interleave", module.apply_rotary_pos_emb)
