"""The engine samples every request from the row before its own."""

from unittest import mock

from tapscope.engine import runner

PATCHES = "engine"
EXPECT = "sampler"
VISIBILITY = "strong"
CAUSE = r"(row|request)s? .*(exchanged|another|other|rolled|before|earlier|holds)|shifted"
WHERE = {"step": 0}


def patch(model):
    sample = runner.sample
    return mock.patch.object(runner, "sample", lambda logits: sample(logits).roll(1))
