"""One row-parallel layer is summed over the ranks twice."""

from benchmarks.verdict.tools import after

PATCHES = "engine"
EXPECT = "model.layers.2.mlp.down_proj"
VISIBILITY = "strong"
CAUSE = r"doubled all-reduce|once too often"
BOTH = {"tp": 2}
BASELINE = [{}, {"framework": "transformers", "tp": 1}]


def patch(model):
    after(model.model.layers[2].mlp.down_proj, model.tp.all_reduce)
