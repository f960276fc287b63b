"""Layers with a sliding window attend to all tokens."""

from unittest import mock

from benchmarks.verdict.families import modeling

FAMILY = "gemma2"
EXPECT = "model"
VISIBILITY = "strong"
CAUSE = r"mask shows|window"
BOTH = {"schedule": "whole"}


def patch(model):
    module = modeling("gemma2")
    return mock.patch.object(module, "create_sliding_window_causal_mask", module.create_causal_mask)
