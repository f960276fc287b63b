"""One layer caches its values in float8 although this was not requested."""

from unittest import mock

import torch
from transformers import DynamicCache

EXPECT = "model.layers.1.self_attn"
VISIBILITY = "subtle"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    update = DynamicCache.update

    def rounded(self, keys, values, layer, *args, **kwargs):
        if layer == 1:
            values = values.to(torch.float8_e4m3fn).to(values.dtype)
        return update(self, keys, values, layer, *args, **kwargs)

    return mock.patch.object(DynamicCache, "update", rounded)
