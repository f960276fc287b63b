"""Weight synchronization leaves one tensor an optimizer step behind: it is off by 0.2 percent."""

import torch

FAMILY = ["llama", "qwen2"]
EXPECT = "model.layers.2.mlp.up_proj"
VISIBILITY = "subtle"


def patch(model):
    weight = model.model.layers[2].mlp.up_proj.weight
    step = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)).sign().to(weight.device)
    weight.data += 2e-3 * weight.data.square().mean().sqrt() * step
