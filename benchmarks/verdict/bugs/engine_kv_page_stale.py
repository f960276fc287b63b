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
    read = StepCache.read_batch

    def stale(self, layer, window):
        keys, values, mask = read(self, layer, window)
        longer = [segment.index for segment in self.segments if segment.position > 8]
        if layer == 1 and longer:
            values = values.clone()
            values[longer, 4:8] = self.cache.values[layer][self.page_table[-1, 0]]
        return keys, values, mask

    return mock.patch.object(StepCache, "read_batch", stale)
