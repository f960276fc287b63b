"""The attention factor of YaRN is applied although YaRN is not configured: tables are 5 percent too large."""

FAMILY = ["llama", "qwen3"]
EXPECT = "model.rotary_emb"
VISIBILITY = "strong"
CAUSE = r"1\.05"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    model.model.rotary_emb.attention_scaling = 1.05
