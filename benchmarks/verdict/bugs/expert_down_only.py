"""Two experts of one layer have each other's down projection."""

FAMILY = ["qwen3-moe", "mixtral"]
EXPECT = "model.layers.1.mlp.experts"
VISIBILITY = "strong"


def patch(model):
    weight = model.model.layers[1].mlp.experts.down_proj
    weight.data[[1, 2]] = weight.data[[2, 1]]
