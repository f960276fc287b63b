"""Gemma's embeddings are not multiplied by the root of the hidden size."""

FAMILY = "gemma2"
EXPECT = "model.embed_tokens"
VISIBILITY = "strong"
CAUSE = r"√width|√hidden|0\.125|1 / √"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    model.model.embed_tokens.embed_scale.fill_(1.0)
