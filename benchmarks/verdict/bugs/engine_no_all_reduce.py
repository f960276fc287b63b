"""One row-parallel layer is not summed over the ranks."""

from benchmarks.verdict.tools import around

PATCHES = "engine"
EXPECT = "model.layers.1.self_attn.o_proj"
VISIBILITY = "strong"
CAUSE = r"not summed over tp|all-reduce over .*missing"
BOTH = {"tp": 2}
BASELINE = [{}, {"framework": "transformers", "tp": 1}]
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    projection = model.model.layers[1].self_attn.o_proj

    def call(forward, input):
        total = projection.tp
        projection.tp = type(total)(total.rank, total.size)
        try:
            return forward(input)
        finally:
            projection.tp = total

    around(projection, call)
