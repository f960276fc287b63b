"""The engine samples every request from the row before its own."""

from unittest import mock

PATCHES = "engine"
EXPECT = "sampler"
VISIBILITY = "strong"
CAUSE = r"(row|request)s? .*(exchanged|another|other|rolled|before|earlier|holds)|shifted"
WHERE = {"step": 0}


def patch(model):
    forward = model.sampler.forward
    return mock.patch.object(model.sampler, "forward", lambda tokens: forward(tokens.roll(1)))
