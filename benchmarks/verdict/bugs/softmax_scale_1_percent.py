"""One layer scales its scores by one percent too much."""

EXPECT = "model.layers.2.self_attn"
VISIBILITY = "subtle"


def patch(model):
    model.model.layers[2].self_attn.scaling *= 1.01
