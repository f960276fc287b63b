"""The values of one layer are detached: nothing upstream of them gets a gradient."""

from benchmarks.verdict.tools import after

FAMILY = ["llama", "gemma3"]
MODEL = {"num_hidden_layers": 8, "seed": 6}
BOTH = {"train": True, "schedule": "whole"}
EXPECT = "model.layers.5.self_attn.v_proj"
VISIBILITY = "strong"
CAUSE = r"detached|no gradient|zero"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    after(model.model.layers[5].self_attn.v_proj, lambda output: output.detach() + 0.0 * output)
