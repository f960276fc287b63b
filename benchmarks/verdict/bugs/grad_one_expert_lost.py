"""The gradient of one expert is lost."""

FAMILY = ["qwen3-moe", "mixtral"]
EXPECT = "model.layers.1.mlp.experts"
VISIBILITY = "strong"
CAUSE = r"zero"
BOTH = {"train": True, "schedule": "whole"}


def patch(model):
    def hook(gradient):
        gradient = gradient.clone()
        gradient[2] = 0
        return gradient

    model.model.layers[1].mlp.experts.down_proj.register_hook(hook)
