"""The shared expert is scaled by its gate without the sigmoid."""

from unittest import mock

from benchmarks.verdict.families import modeling
from benchmarks.verdict.tools import around

FAMILY = "qwen2-moe"
EXPECT = "model.layers.1.mlp"
VISIBILITY = "strong"
CAUSE = r"sigmoid"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    def call(forward, *args, **kwargs):
        with mock.patch.object(modeling("qwen2-moe").F, "sigmoid", lambda x: x):
            return forward(*args, **kwargs)

    around(model.model.layers[1].mlp, call)
