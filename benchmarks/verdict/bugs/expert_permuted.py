"""Two experts of one layer have each other's weights."""

FAMILY = ["qwen3-moe", "mixtral"]
EXPECT = "model.layers.1.mlp.experts"
VISIBILITY = "strong"
CAUSE = r"experts? 1 and 2|experts? .*(swapped|exchanged)"


def patch(model):
    experts = model.model.layers[1].mlp.experts
    for weight in (experts.gate_up_proj, experts.down_proj):
        weight.data[[1, 2]] = weight.data[[2, 1]]
