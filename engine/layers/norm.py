"""Normalisation layers, whole on every rank."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tapscope.engine.layers.probe import WHOLE
from tapscope.engine.weights import Piece, Weighted, parameter


class RMSNorm(Weighted):
    """x / rms(x) * weight over the last axis, arXiv:1910.07467; sums in float32 as transformers' LlamaRMSNorm."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=dtype)
        self.eps = eps
        self.tap_dims = {"in[hidden_states]": WHOLE, "out": WHOLE}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[tokens, size] -> [tokens, size], in the input's dtype."""
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden_states.dtype)

    def pieces(self, path: str) -> Iterator[Piece]:
        """One vector, whole on every rank."""
        yield Piece(f"{path}.weight", tuple(self.weight.shape), self.weight)
