"""The gradient of one norm weight is that of only one of two ranks."""

FAMILY = ["llama", "olmo2"]
EXPECT = "model.layers.2.post_attention_layernorm"
VISIBILITY = "strong"
CAUSE = r"0\.5 ×|/ 2|half"
BOTH = {"train": True, "schedule": "whole"}


def patch(model):
    model.model.layers[2].post_attention_layernorm.weight.register_hook(lambda gradient: 0.5 * gradient)
