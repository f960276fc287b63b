"""One weight is frozen: it never gets a gradient."""

FAMILY = ["llama", "mixtral"]
EXPECT = ["model.layers.1.mlp.up_proj", "model.layers.1.mlp.gate"]
VISIBILITY = "strong"
CAUSE = r"frozen|no gradient|zero|only in baseline"
BOTH = {"train": True, "schedule": "whole"}
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    mlp = model.model.layers[1].mlp
    (mlp.up_proj if hasattr(mlp, "up_proj") else mlp.gate).weight.requires_grad_(False)
