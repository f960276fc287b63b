"""The last row of one projection's output is uninitialized memory with NaN."""

from benchmarks.verdict.tools import after

EXPECT = "model.layers.2.self_attn.v_proj"
VISIBILITY = "strong"
CAUSE = r"nan|not finite|uninitialised"
WHERE = {"step": 0}
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    def change(output):
        output = output.clone()
        output[:, -1, 5:9] = float("nan")
        return output

    after(model.model.layers[2].self_attn.v_proj, change)
