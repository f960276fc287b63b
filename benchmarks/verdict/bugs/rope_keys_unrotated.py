"""In one layer, the keys are not rotated."""

from unittest import mock

from benchmarks.verdict.families import modeling
from benchmarks.verdict.tools import around

EXPECT = "model.layers.1.self_attn"
VISIBILITY = "strong"
CAUSE = r"keys? .*not rotated|rotat.*queries (only|alone)"


def patch(model):
    module = modeling("llama")
    rotate = module.apply_rotary_pos_emb

    def call(forward, *args, **kwargs):
        with mock.patch.object(module, "apply_rotary_pos_emb", lambda q, k, cos, sin: (rotate(q, k, cos, sin)[0], k)):
            return forward(*args, **kwargs)

    around(model.model.layers[1].self_attn, call)
