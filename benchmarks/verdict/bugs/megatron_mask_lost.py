"""One layer of Megatron attends without its mask."""

from benchmarks.verdict.tools import around

PATCHES = "megatron"
EXPECT = ["model.layers.1.self_attn", "decoder.layers.1.self_attention.core_attention"]
VISIBILITY = "strong"
CAUSE = r"mask is lost|mask (shows|hides) \d+ places? more"
BASELINE = [{"framework": "transformers"}, {}]


def patch(model):
    def call(forward, query, key, value, mask, *args, **kwargs):
        return forward(query, key, value, mask & False, *args, **kwargs)

    around(model.decoder.layers[1].self_attention.core_attention, call)
