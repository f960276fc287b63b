"""One layer's two norms share a weight: the second was never loaded."""

FAMILY = ["llama", "qwen3-moe"]
EXPECT = "model.layers.1.post_attention_layernorm"
VISIBILITY = "strong"
CAUSE = r"weight of .*input_layernorm|separate factor per channel"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    layer = model.model.layers[1]
    layer.post_attention_layernorm.weight = layer.input_layernorm.weight
