"""A few channels of one token are uninitialized memory: stale values of another token."""

from benchmarks.verdict.tools import after

EXPECT = "model.layers.1.mlp.gate_proj"
VISIBILITY = "subtle"
TARGET = [{}, {"dtype": "bfloat16"}]
WHERE = {"step": 0, "request": "r0", "position": 6}


def patch(model):
    def change(output):
        if output.shape[1] > 6:
            output = output.clone()
            output[0, 6, 40:48] = output[0, 5, 40:48]
        return output

    after(model.model.layers[1].mlp.gate_proj, change)
