"""Adam's bias correction of the moments is missing."""

import torch

PATCHES = "trainer"
EXPECT = [
    "model.embed_tokens",
    "model.layers.0.self_attn.*",
]  # in bfloat16, the first with a move larger than its rounding
VISIBILITY = "strong"
CAUSE = r"bias correction|not corrected"
BOTH = {"train": True, "schedule": "whole", "optimizer": "adamw"}
TARGET = [{}, {"dtype": "bfloat16", "master": True}]


def patch(trainer):
    def start(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and not optimizer.state[p]:
                    moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                    optimizer.state[p].update(moments, step=torch.tensor(1e6))

    trainer.optimizer.register_step_pre_hook(start)
