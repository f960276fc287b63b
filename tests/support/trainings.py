"""Training of language models, recorded with gradients and parameters; contains no tests."""

from pathlib import Path

import torch
from torch import nn

from tapscope import Dumper


def record_training(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    out: Path,
    *,
    vocabulary: int,
    shape: tuple[int, int],
    params: bool = True,
) -> Path:
    """Train for four steps of next-token prediction on random ids ``[shape]``, the same in every run."""
    draw = torch.Generator().manual_seed(1)
    with Dumper(net, out, keep="full", grads=True, params=params) as dumper:
        for _ in range(4):
            ids = torch.randint(0, vocabulary, shape, generator=draw)
            with dumper.step():
                logits = net(ids[:, :-1]).float()
                nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
                optimizer.step()
            optimizer.zero_grad()
    return out
