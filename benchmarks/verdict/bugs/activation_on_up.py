"""One MLP computes silu(up) * gate."""

from benchmarks.verdict.tools import around

FAMILY = ["llama", "qwen2"]
EXPECT = "model.layers.2.mlp"
VISIBILITY = "strong"
CAUSE = r"silu\(up|up_proj\b.*gate_proj|gate_proj\b.*up_proj|gate and up .*exchanged"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    mlp = model.model.layers[2].mlp

    def call(forward, x):
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        return mlp.down_proj(mlp.act_fn(up) * gate)

    around(mlp, call)
