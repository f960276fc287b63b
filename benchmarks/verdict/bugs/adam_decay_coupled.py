"""Weight decay is added to the gradient, as in Adam but not AdamW."""

import torch

PATCHES = "trainer"
EXPECT = "model.embed_tokens"
VISIBILITY = "strong"
CAUSE = r"weight decay"
BOTH = {"train": True, "schedule": "whole", "optimizer": "adamw"}
TARGET = [{}, {"attention": "sdpa"}]


def patch(trainer):
    def couple(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(p, alpha=group["weight_decay"] / 10)
                    p.mul_(1 + group["lr"] * group["weight_decay"])

    with torch.no_grad():
        trainer.optimizer.register_step_pre_hook(torch.no_grad()(couple))
