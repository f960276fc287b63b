"""The engine does not see the newest cached token while decoding."""

from unittest import mock

import torch

from tapscope.engine.cache import StepCache

PATCHES = "engine"
EXPECT = "model.layers.0.self_attn.attn"
VISIBILITY = "strong"
BASELINE = [{}, {"framework": "transformers"}]
WHERE = {"step": 1}


def patch(model):
    read = StepCache.read_batch

    def short(self, layer, window):
        keys, values, _ = read(self, layer, window)
        return keys, values, torch.arange(keys.shape[1]) < self.lengths[: len(keys), None] - 1

    return mock.patch.object(StepCache, "read_batch", short)
