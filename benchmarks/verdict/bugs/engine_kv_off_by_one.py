"""The engine does not see the newest cached token while decoding."""

from dataclasses import replace
from unittest import mock

from tapscope.engine.cache import StepCache

PATCHES = "engine"
EXPECT = "model.layers.0.self_attn.attn"
VISIBILITY = "strong"
BASELINE = [{}, {"framework": "transformers"}]
WHERE = {"step": 1}


def patch(model):
    read = StepCache.read

    def short(self, layer, segment, start=0):
        return read(self, layer, replace(segment, count=segment.count - (segment.count == 1)), start)

    return mock.patch.object(StepCache, "read", short)
