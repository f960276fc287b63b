"""One layer of the engine reads the second page of every longer request from where another request's lies."""

from unittest import mock

from tapscope.engine.cache import StepCache

PATCHES = "engine"
EXPECT = "model.layers.1.self_attn.attn"
VISIBILITY = "strong"
WHERE = {"step": 1, "request": ["r0", "r2"]}
BOTH = {"page_size": 4}
TARGET = [{}, {"tp": 2}]


def patch(model):
    read = StepCache.read

    def stale(self, layer, segment, start=0):
        keys, values = read(self, layer, segment, start)
        if layer == 1 and segment.position > 8:
            values = values.clone()
            values[4:8] = self.cache.values[layer][self.segments[-1].pages[0]]
        return keys, values

    return mock.patch.object(StepCache, "read", stale)
