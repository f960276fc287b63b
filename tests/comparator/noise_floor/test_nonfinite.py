"""Floors in the presence of infinite errors, which do not affect other layers and do not make any ratio NaN."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tapscope import Dumper
from tapscope.comparator import compare
from tapscope.comparator.noise_floor.floor_table import ratio_of


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return found


def capture(path: Path, keep: str, dtype: torch.dtype, value: float | None = None) -> Path:
    """Capture four layers; ``value`` is written into one output element of the third."""
    torch.manual_seed(0)
    net, x = nn.ModuleDict({"layers": nn.Sequential(*(Layer() for _ in range(4)))}), torch.randn(12, 32)

    def write(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        output = output.clone()
        output[3, 5] = value
        return output

    if value is not None:
        net.get_submodule("layers.2.up").register_forward_hook(write)
    with Dumper(net.to(dtype), path, keep=keep) as dumper, dumper.step():
        net["layers"](x.to(dtype))
    return path


@pytest.mark.parametrize("keep", ["stats", "full"])
@pytest.mark.parametrize("value", [math.inf, math.nan, 3e38])
def test_floor_ignores_infinite_errors_of_other_layers(tmp_path: Path, keep: str, value: float) -> None:
    runs = capture(tmp_path / "a", keep, torch.float32), capture(tmp_path / "b", keep, torch.bfloat16, value)
    report = compare(*runs)
    assert report.first_divergence is not None
    assert report.first_divergence.module == "layers.2.up"
    numbers = [number for f in report.findings for number in (f.floor, f.row_floor, f.ratio, f.added_error_ratio)]
    assert not any(map(math.isnan, numbers))


def test_ratio_of_infinite_error_and_limit_is_one() -> None:
    assert ratio_of(math.inf, math.inf) == 1.0
    assert ratio_of(1.0, math.inf) == 0.0
    assert ratio_of(math.inf, 1.0) == math.inf
