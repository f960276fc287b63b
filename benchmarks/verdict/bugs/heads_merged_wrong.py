"""One layer concatenates the outputs of its heads channel by channel instead of head by head."""

from benchmarks.verdict.tools import around

FAMILY = ["llama", "qwen3"]
EXPECT = "model.layers.2.self_attn"
VISIBILITY = "strong"
CAUSE = r"transposed"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    attention = model.model.layers[2].self_attn
    project = attention.o_proj

    def call(forward, *args, **kwargs):
        attention.__dict__["o_proj"] = lambda x: project(x.unflatten(-1, (4, -1)).transpose(-1, -2).flatten(-2))
        try:
            return forward(*args, **kwargs)
        finally:
            del attention.__dict__["o_proj"]

    around(attention, call)
