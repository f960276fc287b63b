"""The sliding window is one token wider than the model's."""

FAMILY = ["gemma2", "gemma3"]
MODEL = {"hidden_size": 128, "seed": 3}
EXPECT = ["model", "model.layers.0.self_attn"]
VISIBILITY = "strong"
CAUSE = r"mask shows 1 place more|window .*(7|wider|one more|1 more)"
WHERE = {"step": 0}
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    model.config.sliding_window += 1
