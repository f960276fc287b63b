"""Gradients that only one of the runs has, although both have the value."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compare_runs import diff
from torch import nn

from tapscope import Dumper
from tapscope.comparator import CompareOptions, Report
from tapscope.comparator.report.answer import answer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.gate = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)
        self.detached = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        gate = self.gate(hidden)
        return self.last(hidden * (gate.detach() if self.detached else gate).sigmoid())


def run(out: Path, patch: Callable[[Net], object] = lambda net: None, *, grads: bool = True, rules: str = "") -> Path:
    torch.manual_seed(0)
    net = Net()
    patch(net)
    with (
        Dumper(net, out, keep="full", grads=grads, params=True, rules=[rules] if rules else []) as dumper,
        dumper.step(),
    ):
        net(torch.randn(6, 16)).square().sum().backward()
    return out


def diff_with_plain(tmp_path: Path, target: Path, options: CompareOptions | None = None) -> Report:
    return diff(run(tmp_path / f"b{target.name}"), target, options)


def freeze(net: Net) -> None:
    net.gate.weight.requires_grad_(False)


def detach(net: Net) -> None:
    net.detached = True


def silence(net: Net) -> None:
    net.gate.weight.register_hook(torch.zeros_like)


@pytest.mark.parametrize(("patch", "site"), [(freeze, "gate:param[weight].grad"), (detach, "gate:out.grad")])
def test_missing_gradient_is_named(tmp_path: Path, patch: Callable[[Net], None], site: str) -> None:
    report = diff_with_plain(tmp_path, run(tmp_path / "t", patch))
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert (report.first_divergence.module, report.first_divergence.site) == ("gate", site)
    what, where, why, after = answer(report)
    assert what.startswith("what      gate ")
    assert what.endswith(" has no gradient")
    assert why.startswith("why       t recorded the value and no gradient")
    assert "step 0" in where
    assert str(tmp_path / "bt") in after  # the run that has the gradient


def test_missing_gradient_equals_a_zero_gradient(tmp_path: Path) -> None:
    report = diff(run(tmp_path / "z", silence), run(tmp_path / "t", freeze))
    assert report.exit_code == 0


def test_missing_gradient_of_an_unselected_site_is_ignored(tmp_path: Path) -> None:
    assert diff_with_plain(tmp_path, run(tmp_path / "t", grads=False)).exit_code == 0
    assert diff_with_plain(tmp_path, run(tmp_path / "s", rules="gate:param[weight].grad=off")).exit_code == 0


def test_missing_gradient_can_be_deselected(tmp_path: Path) -> None:
    options = CompareOptions(skip=("*weight*",))
    assert diff_with_plain(tmp_path, run(tmp_path / "t", freeze), options).exit_code == 0
