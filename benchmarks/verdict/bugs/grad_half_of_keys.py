"""Half of the input gradient of one key projection is lost, as by a missing all-reduce."""

from benchmarks.verdict.tools import around

EXPECT = ["model.layers.2.self_attn.k_proj", "model.layers.2.self_attn"]  # q and v share this input
VISIBILITY = "strong"
CAUSE = r"k_proj.*(half|0\.5|left out)|half"
BOTH = {"train": True, "schedule": "whole"}


def patch(model):
    def call(forward, x):
        return forward(0.5 * x + 0.5 * x.detach())

    around(model.model.layers[2].self_attn.k_proj, call)
