"""The router's top weights are not normalized to sum to one."""

FAMILY = "qwen3-moe"
EXPECT = "model.layers.1.mlp.gate"
VISIBILITY = "strong"
CAUSE = r"normalis|sum to (one|1)"


def patch(model):
    model.model.layers[1].mlp.gate.norm_topk_prob = False
