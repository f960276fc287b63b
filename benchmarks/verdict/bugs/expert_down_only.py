"""Two experts of one layer have each other's down projection."""

FAMILY = ["qwen3-moe", "mixtral"]
EXPECT = "model.layers.1.mlp.experts"
VISIBILITY = "strong"
CAUSE = r"(down).*(experts? 1|experts? 2)|experts? 1 and 2 .*down"


def patch(model):
    weight = model.model.layers[1].mlp.experts.down_proj
    weight.data[[1, 2]] = weight.data[[2, 1]]
