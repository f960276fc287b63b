"""A gradient that one run has and the other has not, though both have its value."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tapscope import Dumper, open_run
from tapscope.comparator import CompareOptions, Report, compare
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


def diff(tmp_path: Path, target: Path, options: CompareOptions | None = None) -> Report:
    with open_run(run(tmp_path / f"b{target.name}")) as one, open_run(target) as two:
        return compare(one, two, options)


def freeze(net: Net) -> None:
    net.gate.weight.requires_grad_(False)


def detach(net: Net) -> None:
    net.detached = True


def silence(net: Net) -> None:
    net.gate.weight.register_hook(torch.zeros_like)


@pytest.mark.parametrize(("patch", "site"), [(freeze, "gate:param[weight].grad"), (detach, "gate:out.grad")])
def test_a_gradient_that_never_came_is_named(tmp_path: Path, patch: Callable[[Net], None], site: str) -> None:
    report = diff(tmp_path, run(tmp_path / "t", patch))
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert (report.first_divergence.module, report.first_divergence.site) == ("gate", site)
    what, where, why, after = answer(report)
    assert what.startswith("what      gate ")
    assert what.endswith(" has no gradient")
    assert why.startswith("why       t recorded the value and no gradient")
    assert "step 0" in where
    assert str(tmp_path / "bt") in after  # where there is something to be seen


def test_none_at_all_is_no_more_than_zeros(tmp_path: Path) -> None:
    with open_run(run(tmp_path / "z", silence)) as one, open_run(run(tmp_path / "t", freeze)) as two:
        report = compare(one, two)
    assert report.exit_code == 0


def test_what_nobody_asked_for_is_not_missed(tmp_path: Path) -> None:
    assert diff(tmp_path, run(tmp_path / "t", grads=False)).exit_code == 0
    assert diff(tmp_path, run(tmp_path / "s", rules="gate:param[weight].grad=off")).exit_code == 0


def test_a_selection_may_leave_it_out(tmp_path: Path) -> None:
    options = CompareOptions(skip=("*weight*",))
    assert diff(tmp_path, run(tmp_path / "t", freeze), options).exit_code == 0
