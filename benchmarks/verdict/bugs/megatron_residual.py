"""One layer of Megatron adds its residual once more."""

from benchmarks.verdict.tools import around

PATCHES = "megatron"
EXPECT = ["model.layers.2", "decoder.layers.2"]
VISIBILITY = "strong"
CAUSE = r"added once more|residual .*twice|in\[hidden_states\]"
BASELINE = [{"framework": "transformers"}, {}]


def patch(model):
    def call(forward, hidden_states, *args, **kwargs):
        output, *rest = forward(hidden_states, *args, **kwargs)
        return (output + hidden_states, *rest)

    around(model.decoder.layers[2], call)
