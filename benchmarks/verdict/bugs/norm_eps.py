"""One norm adds 0.1 to its variance instead of 1e-6."""

FAMILY = ["llama", "llama-deep"]
EXPECT = "model.layers.2.input_layernorm"
VISIBILITY = "strong"
CAUSE = r"epsilon is larger by 0\.1\b"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    model.model.layers[2].input_layernorm.variance_epsilon = 1e-1
