"""One norm has the eps of another model: 1e-5 instead of 1e-6."""

FAMILY = ["llama", "qwen2"]
EXPECT = "model.layers.1.post_attention_layernorm"
VISIBILITY = "subtle"


def patch(model):
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-5
