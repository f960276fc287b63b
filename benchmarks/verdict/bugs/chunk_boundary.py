"""With chunked prefill, one layer drops the last token of the previous chunk."""

from unittest import mock

from transformers import DynamicCache

EXPECT = "model.layers.1.self_attn"
VISIBILITY = "strong"
CAUSE = r"(value|key)s? .*(zero|lost|missing|left out|not seen)|misses .*(key|token)"
TARGET = {"schedule": "chunks"}
WHERE = {"step": 1}


def patch(model):
    update = DynamicCache.update

    def forgetful(self, keys, values, layer, *args, **kwargs):
        new = keys.shape[-2]
        keys, values = update(self, keys, values, layer, *args, **kwargs)
        if layer == 1 and 1 < new < values.shape[-2]:
            values = values.clone()
            values[..., -new - 1, :] = 0
        return keys, values

    return mock.patch.object(DynamicCache, "update", forgetful)
