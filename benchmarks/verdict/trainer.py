"""Trainer: optimizer steps in separate methods, each of which a case may patch."""

from typing import Any

import torch
from torch import Tensor, nn

LEARNING_RATE = {"adamw": 1e-3, "sgd": 0.05}
"""Large for small models: a parameter moves by about one percent per step."""
MAX_NORM = 1.0


class Trainer:
    """A model, its optimizer and schedule. A ``patch`` changes attributes or replaces methods."""

    def __init__(self, model: Any, name: str, *, master: bool, foreach: bool, fused: bool) -> None:
        """Create the optimizer ``name`` (adamw or sgd); with ``master``, it works on float32 copies of the
        parameters."""
        self.model = model
        self.parameters: list[nn.Parameter] = [p for p in model.parameters() if p.requires_grad]
        self.masters = [nn.Parameter(p.detach().float()) for p in self.parameters] if master else self.parameters
        self.num_micros = 1
        """Forward and backward passes per step; set by the caller."""
        how = {"foreach": foreach} | ({"fused": True} if fused else {})
        self.optimizer: torch.optim.Optimizer = self._optimizer(name, how)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (1 + step))

    def _optimizer(self, name: str, how: dict[str, bool]) -> torch.optim.Optimizer:
        """Create the optimizer, with weight decay for matrices only, as usual."""
        groups = [
            {"params": [p for p in self.masters if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in self.masters if p.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if name == "adamw":
            return torch.optim.AdamW(groups, lr=LEARNING_RATE[name], **how)
        return torch.optim.SGD(groups, lr=LEARNING_RATE[name], momentum=0.9, **how)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return one microbatch's share of the loss: mean cross-entropy, ignoring labels of -100."""
        flat = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
        return nn.functional.cross_entropy(flat, labels.reshape(-1), ignore_index=-100) / self.num_micros

    def clip(self) -> None:
        """Scale all gradients so that their common norm is at most :data:`MAX_NORM`."""
        nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)

    def step(self) -> None:
        """Update the parameters from the gradients."""
        self.clip()
        if self.masters is not self.parameters:
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        self.scheduler.step()
        if self.masters is not self.parameters:
            with torch.no_grad():
                for master, parameter in zip(self.masters, self.parameters, strict=True):
                    parameter.copy_(master)

    def zero_grad(self) -> None:
        """Clear the gradients, after the dumper has recorded them."""
        self.model.zero_grad(set_to_none=True)
