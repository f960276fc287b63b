"""Greedy sampling."""

from torch import Tensor


def sample(logits: Tensor) -> Tensor:
    """The most likely token of each row, the lowest id on ties: [rows, vocab] -> [rows] int64."""
    return logits.argmax(dim=-1)
