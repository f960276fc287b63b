"""Only the engine's decode kernel scales its scores by 4/sqrt(d)."""

from unittest import mock

from tapscope.engine.layers import paged_attention

PATCHES = "engine"
EXPECT = "model.layers.0.self_attn.attn"
VISIBILITY = "strong"
CAUSE = r"scores? .*(4|1) ?(×|/)|scale .*(1|0\.25)"
WHERE = {"step": 1}
BASELINE = [{}, {"framework": "transformers", "tp": 1}]
TARGET = [{}, {"tp": 2, "dtype": "bfloat16"}]


def patch(model):
    if model.tp.rank:
        return None  # the function is patched once for both ranks
    attend = paged_attention._attend_batch

    def scaled(query, *rest):
        return attend(query * 4.0, *rest)

    return mock.patch.object(paged_attention, "_attend_batch", scaled)
