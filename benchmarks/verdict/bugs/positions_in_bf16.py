"""Positions are rounded to bfloat16: from 257 on, some are off by one."""

from benchmarks.verdict.tools import around

FAMILY = ["llama", "qwen2"]
MODEL = {"num_hidden_layers": 2, "max_position_embeddings": 1024}
BOTH = {"workload": "longest"}
EXPECT = "model.rotary_emb"
VISIBILITY = "strong"
CAUSE = r"bf16|bfloat16"
WHERE = {"request": "r0"}
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    around(model.model.rotary_emb, lambda forward, x, position_ids: forward(x, position_ids.bfloat16().long()))
