"""Time embeddings: sines and cosines of large numbers, for which rounding changes the angle by radians."""

import math
from pathlib import Path

import pytest
import torch
from compare_runs import diff
from torch import Tensor, nn

from tapscope import Dumper


class Timesteps(nn.Module):
    """Time embedding as in diffusers, in float32 regardless of the model's dtype; ``flip`` puts cosines first."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.width, self.flip, self.shift, self.period, self.late = width, True, 0, 10_000.0, 0.0

    def forward(self, timesteps: Tensor) -> Tensor:
        half = self.width // 2
        exponents = -math.log(self.period) * torch.arange(half, dtype=torch.float32) / (half - self.shift)
        angles = (timesteps[:, None].float() + self.late) * exponents.exp()
        parts = (angles.cos(), angles.sin()) if self.flip else (angles.sin(), angles.cos())
        return torch.cat(parts, dim=-1)


class Embedding(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.time_proj, self.act = Timesteps(), nn.SiLU()
        self.linear_1, self.linear_2 = nn.Linear(128, width), nn.Linear(width, width)

    def forward(self, timesteps: Tensor) -> Tensor:
        projected = self.time_proj(timesteps).to(self.linear_1.weight.dtype)
        found: Tensor = self.linear_2(self.act(self.linear_1(projected)))
        return found


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.modulate = nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, 3 * width)
        self.up, self.act, self.down = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift, gate = self.modulate(nn.functional.silu(time))[:, None].chunk(3, -1)
        found: Tensor = x + gate * self.down(self.act(self.up(self.norm(x) * (1 + scale) + shift)))
        return found


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time_embed, self.blocks = Embedding(), nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(64, 16)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        time = self.time_embed(sigma.to(x.dtype) * 1000)
        for block in self.blocks:
            x = block(x, time)
        found: Tensor = self.out(x)
        return found


def record(out: Path, dtype: torch.dtype, **changes: object) -> Path:
    torch.manual_seed(3)
    model = Denoiser()
    for name, value in changes.items():
        setattr(model.time_embed.time_proj, name, value)
    model = model.to(dtype)
    draw = torch.Generator().manual_seed(5)
    with Dumper(model, out, keep="full") as dumper, torch.no_grad():
        for sigma in (0.98713, 0.7077, 0.4011):
            x = torch.randn(2, 12, 64, generator=draw).to(dtype)
            with dumper.step():
                model(x, torch.tensor([sigma, sigma * 0.93]))
    return out


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("times") / "golden", torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_time_embeddings_of_rounded_timesteps_agree(golden: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    report = diff(golden, record(tmp_path / "t", dtype))
    assert (report.exit_code, report.divergences) == (0, ()), str(report)


@pytest.mark.parametrize("change", [{"flip": False}, {"shift": 1}, {"period": 5000.0}, {"late": 3.0}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_time_embeddings_with_wrong_frequencies_are_named(
    golden: Path, tmp_path: Path, dtype: torch.dtype, change: dict[str, object]
) -> None:
    report = diff(golden, record(tmp_path / "t", dtype, **change))
    assert report.first_divergence is not None
    assert report.first_divergence.module == "time_embed.time_proj"
