"""One layer of the engine reads another request's page as the second page of every longer request."""

from unittest import mock

from tapscope.engine.layers import paged_attention
from tapscope.kernels.cpu.paged import paged_reference

PATCHES = "engine"
EXPECT = "model.layers.1.self_attn.attn"
VISIBILITY = "strong"
CAUSE = r"page|(key|value|token)s? .*(another request|other request|stale|request r)"
WHERE = {"step": 1, "request": ["r0", "r2"]}
BOTH = {"page_size": 4}
TARGET = [{}, {"tp": 2}]


def patch(model):
    attend = paged_attention._attend_single

    def stale(query, layer, cache, spec):
        count = cache.num_single
        longer = [segment.index for segment in cache.segments[:count] if segment.position > 8]
        if layer != 1 or not longer:
            return attend(query, layer, cache, spec)
        table = cache.page_table[:count].clone()
        table[longer, 1] = cache.page_table[count - 1, 0]
        pools = cache.pools(layer)
        return [paged_reference(query[:count], *pools, table, cache.lengths[:count], spec.scale, spec.window)]

    return mock.patch.object(paged_attention, "_attend_single", stale)
