"""The engine samples every request from the row before its own."""

from unittest import mock

from tapscope.engine.execution import model_runner

PATCHES = "engine"
EXPECT = "sampler"
VISIBILITY = "strong"
CAUSE = r"(row|request)s? .*(exchanged|another|other|rolled|before|earlier|holds)|shifted"
WHERE = {"step": 0}


def patch(model):
    sample = model_runner.sample
    return mock.patch.object(model_runner, "sample", lambda logits: sample(logits).roll(1))
