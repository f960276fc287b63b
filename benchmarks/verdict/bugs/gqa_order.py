"""Key/value heads are tiled over the query heads instead of repeated one by one."""

from unittest import mock

from benchmarks.verdict.families import modeling

EXPECT = "model.layers.0.self_attn"
VISIBILITY = "strong"
CAUSE = r"(heads?) .*(tiled|repeated|order)|grouped"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    return mock.patch.object(modeling("llama"), "repeat_kv", lambda states, count: states.repeat(1, count, 1, 1))
