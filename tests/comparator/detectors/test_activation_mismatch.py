"""Activation functions whose difference is below the floor, identified from each run's own inputs and outputs."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from compare_runs import diff
from torch import nn
from transformers.activations import NewGELUActivation, QuickGELUActivation, ReLUSquaredActivation

from tapscope import Dumper
from tapscope.comparator.detectors.activation_functions import FUNCTIONS, derivative

KNOWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu (tanh)": nn.GELU("tanh"),
    "gelu (quick)": QuickGELUActivation(),
    "hard swish": nn.functional.hardswish,
    "relu6": nn.functional.relu6,
    "relu": nn.functional.relu,
    "relu squared": ReLUSquaredActivation(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
OWN: dict[str, nn.Module] = {
    "silu": nn.SiLU(),
    "hard": nn.Hardswish(),
    "exact": nn.GELU(),
    "kernel": nn.GELU("tanh"),
    "written": NewGELUActivation(),
    "quick": QuickGELUActivation(),
}
"""The activations of a model; the written-out ones round every intermediate result."""
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Backwards(nn.GELU):
    """GELU with the gradient of its tanh approximation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.gelu(x, approximate="tanh")
        return y + (super().forward(x) - y).detach()


class Net(nn.Module):
    """Every activation, applied to the output of one linear map."""

    def __init__(self, activations: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 96), nn.Linear(96, 24)
        self.act = nn.ModuleDict(activations)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all activations, [rows, 24]."""
        return sum((self.down(act(self.up(x))) for act in self.act.values()), torch.zeros((), dtype=x.dtype))


def run(path: Path, dtype: torch.dtype = torch.float32, **others: nn.Module) -> Path:
    torch.manual_seed(0)
    model = Net(OWN | others).to(dtype)
    x = 2.0 * torch.randn(64, 24, generator=torch.Generator().manual_seed(1))
    with Dumper(model, path, keep="full", grads=True) as dumper, dumper.step():
        model(x.to(dtype)).float().square().sum().backward()
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs in float32 and in both 16-bit dtypes."""
    root = tmp_path_factory.mktemp("pointwise")
    return {"fp32": run(root / "fp32")} | {name: run(root / name, dtype) for name, dtype in NARROW.items()}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_activation_mismatch_functions_and_derivatives_match_torch(name: str) -> None:
    x = torch.linspace(-9.03, 9.07, 4001, dtype=torch.float64, requires_grad=True)
    y = KNOWN[name](x)
    y.sum().backward()
    assert x.grad is not None
    at = x.detach().numpy()
    np.testing.assert_allclose(FUNCTIONS[name](at), y.detach().numpy(), atol=1e-12)
    smooth = np.abs(np.abs(at)[:, None] - [0.0, 3.0]).min(1) > 1e-3  # away from the kinks
    np.testing.assert_allclose(derivative(FUNCTIONS[name])(at)[smooth], x.grad.numpy()[smooth], atol=1e-7)


@pytest.mark.parametrize("pair", [("fp32", "bf16"), ("fp32", "fp16"), ("fp16", "bf16")], ids="-".join)
def test_activation_mismatch_ignores_the_dtype(pair: tuple[str, str], runs: dict[str, Path]) -> None:
    """An activation may be one kernel, or consist of operations that each round."""
    report = diff(*(runs[name] for name in pair))
    assert [f"{f.site} {f.ratio:.2f} {f.notes}" for f in report.findings if f.verdict.is_bad] == []


@pytest.mark.parametrize("name", NARROW)
def test_activation_mismatch_gelu_is_not_its_tanh_approximation(
    name: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    others = {"kernel": nn.GELU(), "written": nn.GELU(), "exact": Backwards()}
    target = run(tmp_path / "t", NARROW[name], **others)
    for baseline in ("fp32", name):
        report = diff(runs[baseline], target)
        found = {f.site: f for f in report.findings if f.test == "activation"}
        sites = {"act.kernel:out", "act.exact:in[input].grad"}
        assert sites <= set(found)
        assert set(found) - sites <= {"act.written:out", *(f"act.{name}:in[input].grad" for name in others)}
        assert all(f.verdict.is_bad for f in found.values())
        said = "it is gelu (tanh) of its input in the baseline, and gelu in the target"
        assert said in found["act.kernel:out"].notes[0]
        assert "it is the gradient of gelu of its input in the" in found["act.exact:in[input].grad"].notes[0]
        # A function written out in bfloat16 cannot be identified because of its intermediate roundings.
        assert ("act.written:out" in found) == (baseline != "bf16")
