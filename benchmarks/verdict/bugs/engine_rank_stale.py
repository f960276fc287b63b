"""One rank has a stale weight from an older update."""

import torch

PATCHES = "engine"
FAMILY = ["llama", "qwen2"]
MODEL = {"num_hidden_layers": 8, "hidden_size": 128}
BOTH = [{"tp": 2}, {"tp": 2, "dtype": "bfloat16"}]
EXPECT = ["model.layers.5.mlp.down_proj", "model.layers.5.mlp.down_proj.partial"]
VISIBILITY = "strong"
CAUSE = r"(weight|parameter) .*(differ|other|another|stale)"
WHERE = {"rank": 1}


def patch(model):
    if model.tp.rank == 1:
        weight = model.model.layers[5].mlp.down_proj.weight
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        weight.data += (0.05 * weight.data.float().std() * noise).to(weight.dtype)
