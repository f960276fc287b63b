"""Explanations: hypotheses tested on the values of a culprit; only a clear winner is reported."""
