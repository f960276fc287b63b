"""The engine's post-attention norms have the wrong eps, in float32 and bfloat16 against transformers."""

PATCHES = "engine"
EXPECT = "model.layers.0.post_attention_layernorm"
VISIBILITY = "strong"
CAUSE = r"epsilon is larger by 0\.1\b"
BASELINE = {"framework": "transformers"}
TARGET = [{}, {"dtype": "bfloat16"}, {"tp": 2, "dtype": "bfloat16"}]


def patch(model):
    for layer in model.model.layers:
        layer.post_attention_layernorm.eps = 0.1
