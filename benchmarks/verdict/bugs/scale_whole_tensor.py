"""A quantization scale is off: one projection is 3 percent too large."""

FAMILY = ["llama", "qwen3"]
EXPECT = "model.layers.2.self_attn.v_proj"
VISIBILITY = "subtle"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    model.model.layers[2].self_attn.v_proj.weight.data *= 1.03
