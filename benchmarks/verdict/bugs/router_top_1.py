"""One layer routes every token to one expert instead of two."""

from benchmarks.verdict.tools import around

FAMILY = ["mixtral", "qwen3-moe"]
EXPECT = "model.layers.1.mlp.gate"
VISIBILITY = "strong"
CAUSE = r"top.?1|1 expert|one expert|column 1: target is zero"


def patch(model):
    def call(forward, hidden):
        logits, weights, index = forward(hidden)
        weights = weights.clone()
        weights[:, 0], weights[:, 1] = 1.0, 0.0
        return logits, weights, index

    around(model.model.layers[1].mlp.gate, call)
