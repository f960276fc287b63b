"""In later chunks of a prompt, a token does not attend to itself."""

from unittest import mock

from tapscope.engine.layers import paged_attention

PATCHES = "engine"
FAMILY = ["llama", "mixtral"]
MODEL = {"num_hidden_layers": 5, "seed": 2}
BOTH = {"engine": {"max_num_batched_tokens": 8}}
BASELINE = [{}, {"framework": "transformers", "engine": {}}]
EXPECT = ["model.layers.0.self_attn.attn", "model.layers.0.self_attn"]
VISIBILITY = "strong"
CAUSE = r"(key of its own|itself|own (key|token|position))"


def patch(model):
    one = paged_attention.attend_one

    def call(query, keys, values, diagonal, spec, masks):
        return one(query, keys, values, diagonal - 1 if diagonal and len(query) > 1 else diagonal, spec, masks)

    return mock.patch.object(paged_attention, "attend_one", call)
