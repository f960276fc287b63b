"""One layer adds its residual twice."""

from benchmarks.verdict.tools import around

FAMILY = ["llama", "qwen3"]
EXPECT = "model.layers.1"
VISIBILITY = "strong"
CAUSE = r"added once more|residual .*twice"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    def call(forward, hidden_states, **kwargs):
        return forward(hidden_states, **kwargs) + hidden_states

    around(model.model.layers[1], call)
