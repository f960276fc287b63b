"""The soft-cap of the final logits is missing."""

FAMILY = "gemma2"
EXPECT = ""
VISIBILITY = "strong"
CAUSE = r"soft.?cap"


def patch(model):
    model.config.final_logit_softcapping = None
