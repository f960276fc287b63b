"""One MLP clamps its gate at 2, as a different model does."""

from benchmarks.verdict.tools import around

FAMILY = ["llama", "qwen2"]
EXPECT = "model.layers.1.mlp"
VISIBILITY = "subtle"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    mlp = model.model.layers[1].mlp

    def call(forward, x):
        gate = mlp.gate_proj(x).clamp(max=2.0)
        return mlp.down_proj(mlp.act_fn(gate) * mlp.up_proj(x))

    around(mlp, call)
