"""One dropout module of GPT-2 is in training mode."""

FAMILY = "gpt2"
EXPECT = "transformer.h.1.mlp.dropout"
VISIBILITY = "strong"
CAUSE = r"dropout"


def patch(model):
    model.transformer.h[1].mlp.dropout.train()
