"""The norm of the queries of one layer is skipped."""

from benchmarks.verdict.tools import around

FAMILY = ["qwen3", "qwen3-moe"]
EXPECT = "model.layers.1.self_attn.q_norm"
VISIBILITY = "strong"
CAUSE = r"its own input|did nothing|skipped"


def patch(model):
    around(model.model.layers[1].self_attn.q_norm, lambda forward, hidden: hidden)
