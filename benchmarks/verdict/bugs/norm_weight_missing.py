"""The weight of the final norm is not loaded: all ones."""

FAMILY = ["llama", "qwen2"]
EXPECT = "model.norm"
VISIBILITY = "strong"
CAUSE = r"without a weight|weight .*(missing|ones)"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    model.model.norm.weight.data.fill_(1.0)
