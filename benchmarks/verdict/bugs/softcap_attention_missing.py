"""The soft-cap of one layer's attention scores is missing."""

FAMILY = "gemma2"
EXPECT = "model.layers.1.self_attn"
VISIBILITY = "subtle"


def patch(model):
    model.model.layers[1].self_attn.attn_logit_softcapping = None
