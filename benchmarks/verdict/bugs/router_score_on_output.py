"""Llama 4's router score scales the expert's output instead of its input."""

from benchmarks.verdict.tools import around

FAMILY = "llama4"
EXPECT = ["model.layers.1.feed_forward", "model.layers.1.feed_forward.experts"]
VISIBILITY = "strong"
CAUSE = r"(score|weight|router).*(output|input|gives|takes)"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    block = model.model.layers[1].feed_forward

    def call(forward, hidden):
        hidden = hidden.reshape(-1, block.hidden_dim)
        scores, logits = block.router(hidden)
        routed = block.experts(hidden.repeat(scores.shape[1], 1)) * scores.transpose(0, 1).reshape(-1, 1)
        return block.shared_expert(hidden) + routed.reshape(scores.shape[1], *hidden.shape).sum(0), logits

    around(block, call)
