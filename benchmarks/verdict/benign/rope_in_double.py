"""Rotary angles are computed in float64; positions up to 600."""

import torch

from benchmarks.verdict.tools import around

FAMILY = ["llama", "llama3", "qwen3"]
MODEL = {"num_hidden_layers": 2, "max_position_embeddings": 1024}
BOTH = {"workload": "longest"}
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    rotary = model.model.rotary_emb

    def call(forward, x, position_ids):
        angles = position_ids[..., None].double() * rotary.inv_freq.double()
        both = torch.cat([angles, angles], -1)
        return tuple((table * rotary.attention_scaling).to(x.dtype) for table in (both.cos(), both.sin()))

    around(rotary, call)
