"""After a prefix-cache hit, one layer reads the second page in place of the first."""

from unittest import mock

from tapscope.engine.kv_cache.step_cache import StepCache

PATCHES = "engine"
MODEL = {"num_hidden_layers": 5, "seed": 3}
BOTH = {"workload": "shared", "page_size": 4, "engine": {"prefix_cache": True, "max_num_seqs": 1}}
EXPECT = ["model.layers.2.self_attn.attn", "model.layers.2.self_attn"]
VISIBILITY = "strong"
CAUSE = r"page|(keys|values|tokens) .*(position|place|other)"
WHERE = {"request": "r1"}


def patch(model):
    read = StepCache.read

    def call(self, layer, segment, start=0):
        if layer != 2 or segment.position == 0 or segment.count < 2:
            return read(self, layer, segment, start)
        kept, self.page_table = self.page_table, self.page_table.clone()
        self.page_table[segment.index, 0] = kept[segment.index, 1]
        try:
            keys, values = read(self, layer, segment, start)
            return keys.clone(), values.clone()
        finally:
            self.page_table = kept

    return mock.patch.object(StepCache, "read", call)
