"""Tensors laid out [batch, channels, height, width]: a channel is the second axis, not a column of the picture."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tapscope import Dumper
from tapscope.comparator import Report, compare
from tapscope.run import open_run


class Vision(nn.Module):
    """Convolutions, a norm over the batch and one over groups, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first_norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv, self.norm, self.act = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
        self.group_norm, self.head = nn.GroupNorm(4, 16), nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first_norm(self.stem(x)))
        out: Tensor = self.head(self.group_norm(x + self.act(self.norm(self.conv(x)))))
        return out


class Signal(nn.Module):
    """The same of three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.act, self.conv = nn.Conv1d(3, 16, 3, padding=1), nn.GELU(), nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(self.act(self.stem(x)))
        return out


def capture(model: nn.Module, x: Tensor, out: Path, dtype: torch.dtype, harm: Callable[[nn.Module], object]) -> None:
    model = copy.deepcopy(model).eval().to(dtype)
    harm(model)
    with Dumper(model, out, keep="full"), torch.no_grad():
        model(x.to(dtype))


def report(kind: type[nn.Module], tmp_path: Path, harm: Callable[[nn.Module], object]) -> Report:
    """Float32 against bfloat16, which ``harm`` was done to."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = kind()
        x = torch.randn(4, 3, *((12, 12) if kind is Vision else (64,)))
    capture(model, x, tmp_path / "b", torch.float32, lambda model: None)
    capture(model, x, tmp_path / "t", torch.bfloat16, harm)
    with open_run(tmp_path / "b") as one, open_run(tmp_path / "t") as two:
        return compare(one, two)


def scaled(module: str, factor: float) -> Callable[[nn.Module], object]:
    return lambda model: model.get_submodule(module).weight.data[5].mul_(factor)


@pytest.mark.parametrize(
    ("kind", "module"), [(Vision, "stem"), (Vision, "conv"), (Vision, "group_norm"), (Signal, "conv")]
)
def test_one_scaled_channel_of_an_image_is_named_in_16_bits(tmp_path: Path, kind: type[nn.Module], module: str) -> None:
    found = report(kind, tmp_path, scaled(module, 1.149))
    assert [d.module for d in found.divergences] == [module]
    assert found.divergences[0].finding.test == "channel"
    assert 0.09 < found.divergences[0].finding.error < 0.16, (
        "its bias is not scaled, and small channels count as typical"
    )


@pytest.mark.parametrize("kind", [Vision, Signal])
def test_rounding_to_16_bits_scales_no_channel(tmp_path: Path, kind: type[nn.Module]) -> None:
    found = report(kind, tmp_path, lambda model: None)
    assert (found.exit_code, found.divergences) == (0, ())
