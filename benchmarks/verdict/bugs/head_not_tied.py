"""Word embeddings are tied, but lm_head kept weights of an earlier training step."""

import torch

FAMILY = "llama-tied"
EXPECT = "lm_head"
VISIBILITY = "strong"
CAUSE = r"(weight|parameter) .*(differ|other|another)|not tied"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    weight = model.lm_head.weight.data
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(weight.device)
    model.lm_head.weight = torch.nn.Parameter(weight + (noise * weight.float().std() * 0.2).to(weight.dtype))
