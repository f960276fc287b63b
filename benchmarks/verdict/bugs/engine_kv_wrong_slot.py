"""In decode, one layer of the engine writes the keys of one request to another request's page."""

from unittest import mock

from tapscope.engine.kv_cache.step_cache import StepCache

PATCHES = "engine"
EXPECT = "model.layers.2.self_attn.attn"
VISIBILITY = "strong"
CAUSE = r"keys? .*(another request|other request|exchanged|request r)"
WHERE = {"step": 1, "request": ["r0", "r1"]}


def patch(model):
    write = StepCache.write

    def misplaced(self, layer, key, value):
        if layer == 2 and len(self.segments) > 1 and self.segments[0].count == 1:
            key = key.clone()
            key[[0, 1]] = key[[1, 0]]
        write(self, layer, key, value)

    return mock.patch.object(StepCache, "write", misplaced)
