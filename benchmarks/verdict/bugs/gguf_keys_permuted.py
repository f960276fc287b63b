"""The row permutation of a GGUF conversion is undone for the queries but not for the keys."""

EXPECT = "model.layers.2.self_attn.k_proj"
VISIBILITY = "strong"
CAUSE = r"interleaved|two halves"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    weight = model.model.layers[2].self_attn.k_proj.weight
    heads = weight.data.view(2, 2, -1, weight.shape[1])
    weight.data = heads.transpose(1, 2).reshape(weight.shape).contiguous()
