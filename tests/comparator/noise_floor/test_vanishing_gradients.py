"""Gradients that vanish analytically: both runs contain only rounding, and optimizer updates from it are noise."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attention_net import Layer
from compare_runs import diff
from soak_cases import mostly_soak
from torch import Tensor, nn
from trainings import record_training

_Patch = Callable[["Net"], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 64), nn.Linear(64, 100)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(x)
        return found


def train(out: Path, dtype: torch.dtype = torch.float32, *, fused: bool = False, patch: _Patch | None = None) -> Path:
    """Train for four steps of AdamW; biases are initialized to zero, as usual."""
    torch.manual_seed(0)
    net = Net()
    for name, parameter in net.named_parameters():
        nn.init.zeros_(parameter) if name.endswith("bias") else None
    for layer in net.layers:
        layer.attention.fused = fused
    net = net.to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    if patch is not None:
        patch(net)
    return record_training(net, optimizer, out, vocabulary=100, shape=(4, 12))


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("vanishing") / "golden")


@pytest.mark.parametrize(
    ("dtype", "fused"),
    mostly_soak([(torch.float32, True), (torch.bfloat16, False)], default=[(torch.bfloat16, False)]),
)
def test_vanishing_gradients_adam_update_of_a_key_bias_is_noise(
    golden: Path, tmp_path: Path, dtype: torch.dtype, fused: bool
) -> None:
    report = diff(golden, train(tmp_path / "t", dtype, fused=fused))
    bias = next(f for f in report.findings if f.site == "layers.0.attention.key:param[bias]")
    assert bias.error > 1.0  # the error exceeds the size of the bias
    assert report.exit_code == 0, report.first_divergence


@pytest.mark.parametrize("fused", [False, True])
def test_vanishing_gradients_gradient_above_the_noise_is_named(golden: Path, tmp_path: Path, fused: bool) -> None:
    def harm(net: Net) -> None:
        net.layers[1].attention.key.bias.register_hook(lambda gradient: 1000.0 * gradient)

    first = diff(golden, train(tmp_path / "t", fused=fused, patch=harm)).first_divergence
    assert first is not None
    assert first.site == "layers.1.attention.key:param[bias].grad"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vanishing_gradients_bias_moving_the_other_way_is_named(
    golden: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    def harm(net: Net) -> None:
        net.layers[1].up.bias.register_hook(lambda gradient: -gradient)

    first = diff(golden, train(tmp_path / "t", dtype, patch=harm)).first_divergence
    assert first is not None
    assert first.site == "layers.1.up:param[bias].grad"
