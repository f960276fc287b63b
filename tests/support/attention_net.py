"""A transformer layer with explicit or fused attention; contains no tests."""

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads, self.fused = heads, False

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        if self.fused:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            mixed = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1) @ v
        found: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


class Layer(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(width), nn.LayerNorm(width)
        self.up, self.act, self.down = nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        found: Tensor = x + self.down(self.act(self.up(self.norm2(x))))
        return found
