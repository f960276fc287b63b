"""Convolutional networks: an inherited error is not mistaken for rounding, whichever other sites were recorded."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from residual_net import ResidualNet, train_residual_net
from torch import Tensor, nn

from tapscope import Dumper
from tapscope.comparator import CompareOptions, Report, Verdict, compare

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
IMAGES[:, :, 11:] *= 0.002
"""Images that are dark at the bottom, with near-zero rows."""


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.relu(self.bn1(self.conv1(x)))
        return self.relu(x + self.bn2(self.conv2(hidden)))


class Net(nn.Module):
    def __init__(self, blocks: int = 2, channels: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(Block(channels) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def net() -> nn.Module:
    torch.manual_seed(5)
    model = Net().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_var.uniform_(0.3, 1.5)
                module.weight.uniform_(0.5, 1.5)
            elif isinstance(module, nn.Conv2d) and module.bias is not None:
                module.bias.zero_()
                module.bias.normal_(0, 0.002)
    return model


def capture(model: nn.Module, path: Path) -> Path:
    with torch.no_grad(), Dumper(model, path, keep="full", force=True):
        model(IMAGES)
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    model = net()
    return model, capture(model, tmp_path_factory.mktemp("base") / "run")


def scaled(model: nn.Module, **by: float) -> nn.Module:
    """Return a copy with the weights of some convolutions multiplied."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, factor in by.items():
            other.get_submodule(f"blocks.{name.replace('_', '.')}").weight *= factor
    return other


def diff_model(baseline: Path, model: nn.Module, path: Path, **options: object) -> Report:
    return compare(baseline, capture(model, path), CompareOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("factor", [1.3, 1.8])
def test_batch_norm_inherited_error_differs_downstream(
    base: tuple[nn.Module, Path], tmp_path: Path, factor: float
) -> None:
    model, baseline = base
    report = diff_model(baseline, scaled(model, **{"0_conv2": factor}), tmp_path / "t")
    assert report.first_divergence is not None
    assert report.first_divergence.module == "blocks.0.conv2"
    behind = [f for f in report.findings if f.order > report.first_divergence.finding.order and f.metrics]
    assert {f.site: f.verdict for f in behind if f.verdict is not Verdict.DIFFERS} == {}
    assert {f.role for f in behind} == {"downstream"}
    alone = compare(baseline, tmp_path / "t", CompareOptions(sites=(":out",))).findings
    assert [f.verdict for f in alone] == [Verdict.DIFFERS]


class Normalised(nn.Module):
    """Convolutions, each followed by a batch norm."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        widths = [3, channels, channels]
        self.convs = nn.ModuleList(nn.Conv2d(n, channels, 3, padding=1, bias=False) for n in widths)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in widths)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nn.functional.silu(norm(conv(x)))
        return x


def capture_training(path: Path, size: int, mean: float, *, channels_last: bool, epsilon: float = 1e-5) -> Path:
    """Capture a forward and a backward with batch statistics; ``channels_last`` changes the summation order."""
    torch.manual_seed(0)
    model, images = Normalised().train(), torch.randn(4, 3, size, size) + mean
    model.norms[1].eps = epsilon
    if channels_last:
        model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    with Dumper(model, path, keep="full", grads=True) as dumper, dumper.step():
        model(images).square().mean().backward()
    return path


@pytest.mark.parametrize("size", [24, 48])
@pytest.mark.parametrize("mean", [0.0, 2.0])
def test_batch_norm_statistics_may_be_reduced_in_another_order(tmp_path: Path, size: int, mean: float) -> None:
    one = capture_training(tmp_path / "one", size, mean, channels_last=False)
    two = capture_training(tmp_path / "two", size, mean, channels_last=True)
    report = compare(one, two)
    assert report.exit_code == 0, report.first_divergence
    wrong = capture_training(tmp_path / "wrong", size, mean, channels_last=True, epsilon=1e-4)
    first = compare(one, wrong).first_divergence
    assert first is not None
    assert first.module == "norms.1"


@pytest.mark.parametrize("seed", [4])
def test_batch_norm_offset_adds_up_in_the_weight_gradient_before_it(tmp_path: Path, seed: int) -> None:
    how: dict[str, Any] = {"channels": (16, 16, 16), "shape": (16, 8), "mean": 1.0}
    one = train_residual_net(tmp_path / "one", seed, **how)
    two = train_residual_net(tmp_path / "two", seed, channels_last=True, **how)
    report = compare(one, two)
    assert report.exit_code == 0, report.first_divergence
    assert compare(one, two, CompareOptions(disabled=frozenset({"batch_norm_offset"}))).exit_code == 1


def test_batch_norm_offset_does_not_explain_a_wrong_row(tmp_path: Path) -> None:
    def harm(net: ResidualNet) -> None:
        rows = torch.ones(16, 1, 1, 1)
        rows[3] = 1.01
        net.blocks[2].conv2.weight.register_hook(lambda gradient: gradient * rows)  # type: ignore[union-attr]

    how: dict[str, Any] = {"channels": (16, 16, 16), "shape": (16, 8), "mean": 1.0}
    one = train_residual_net(tmp_path / "one", 4, **how)
    first = compare(
        one, train_residual_net(tmp_path / "two", 4, channels_last=True, patch=harm, **how)
    ).first_divergence
    assert first is not None
    assert first.site == "blocks.2.conv2:param[weight].grad"
