"""The bias that balances experts is not loaded."""

FAMILY = "deepseek-v3"
EXPECT = "model.layers.2.mlp.gate"
VISIBILITY = "strong"
CAUSE = r"router's bias is not used"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    model.model.layers[2].mlp.gate.e_score_correction_bias.zero_()
