"""Two experts of one layer have each other's weights, which both runs recorded."""

FAMILY = ["qwen3-moe", "mixtral"]
EXPECT = "model.layers.1.mlp.experts"
VISIBILITY = "strong"
CAUSE = r"experts 1 and 2 are exchanged: each has the other's gate_up_proj and down_proj"
BOTH = {"train": True, "schedule": "whole"}


def patch(model):
    experts = model.model.layers[1].mlp.experts
    for weight in (experts.gate_up_proj, experts.down_proj):
        weight.data[[1, 2]] = weight.data[[2, 1]]
