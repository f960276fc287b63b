"""The engine ignores the newest cached token in decode."""

from unittest import mock

from tapscope.kernels.cpu.paged import paged_reference

PATCHES = "engine"
EXPECT = "model.layers.0.self_attn.attn"
VISIBILITY = "strong"
CAUSE = r"(newest|own|last|itself).*(key|token|position)|(key|token|position).*(newest|own|last|itself)"
BASELINE = [{}, {"framework": "transformers"}]
WHERE = {"step": 1}


def patch(model):
    def short(query, keys, values, page_table, lengths, scale, window, **stored):
        return paged_reference(query, keys, values, page_table, lengths - 1, scale, window, **stored)

    return mock.patch("tapscope.engine.layers.paged_attention.paged_attention", short)
