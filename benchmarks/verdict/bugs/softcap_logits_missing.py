"""The soft-cap of the final logits is missing."""

FAMILY = "gemma2"
EXPECT = ""
VISIBILITY = "strong"


def patch(model):
    model.config.final_logit_softcapping = None
