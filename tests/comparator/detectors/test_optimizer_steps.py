"""Training over several optimizer steps: the effect of rounding on a parameter, and the step in which an error
begins."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare_runs import diff
from factories import RunFactory
from torch import nn
from trainings import record_training

from tapscope.comparator import Report
from tapscope.comparator.detectors.optimizer_steps import beginning
from tapscope.comparator.matching.match import Pair
from tapscope.comparator.metrics.error_distribution import NO_ERROR, ErrorDistribution, ParameterUpdate
from tapscope.comparator.metrics.updates import error_of_updates
from tapscope.comparator.noise_floor.row_concentration import weakness
from tapscope.comparator.pair_analysis.pair_result import PairMeta, PairResult
from tapscope.comparator.report.answer import answer
from tapscope.comparator.verdict.finding import Finding, Verdict
from tapscope.comparator.verdict.localise import Divergence


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.act = nn.ReLU()
        self.down = nn.Linear(64, 50)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.down(self.act(self.up(self.norm(self.embed(ids)))))


def train(
    out: Path,
    dtype: torch.dtype = torch.float32,
    *,
    fused: bool = False,
    patch: Callable[[Net, torch.optim.Optimizer], None] | None = None,
    params: bool = True,
) -> Path:
    """Capture four steps of AdamW, including gradients."""
    torch.manual_seed(0)
    net = Net().to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1, fused=fused or None)
    if patch is not None:
        patch(net, optimizer)
    return record_training(net, optimizer, out, vocabulary=50, shape=(4, 9), params=params)


def report(baseline: Path, target: Path) -> Report:
    return diff(baseline, target)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("training") / "golden")


@pytest.mark.parametrize(("dtype", "fused"), [(torch.float32, True), (torch.bfloat16, False)])
def test_optimizer_steps_of_another_implementation_or_dtype_agree(
    golden: Path, tmp_path: Path, dtype: torch.dtype, fused: bool
) -> None:
    found = report(golden, train(tmp_path / "other", dtype, fused=fused))
    assert found.exit_code == 0, found.first_divergence
    weight = next(f for f in found.findings if f.site == "up:param[weight]")
    assert weight.verdict is Verdict.CLOSE
    assert weight.inputs == "captured"  # its gradient


def test_optimizer_steps_swapped_betas_are_named_in_their_first_step(golden: Path, tmp_path: Path) -> None:
    def swap(net: Net, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["betas"] = group["betas"][::-1]

    found = report(golden, train(tmp_path / "other", patch=swap))
    first = found.first_divergence
    assert first is not None
    assert first.site == "embed:param[weight]"
    assert first.step == 1  # bias correction makes the first step equal
    assert len(found.divergences) == 1  # one optimizer step, one divergence
    assert first.shared == ("norm", "up", "down")
    assert "the parameters of 3 more modules of 4 differ, too: the cause is what they share" in "\n".join(answer(found))


def test_optimizer_steps_two_independent_bugs_are_two_divergences(golden: Path, tmp_path: Path) -> None:
    def harm(net: Net, optimizer: torch.optim.Optimizer) -> None:
        net.up.weight.register_hook(lambda gradient: 0.5 * gradient)
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p is not net.embed.weight]

    found = report(golden, train(tmp_path / "other", patch=harm))
    assert {(d.site, d.shared) for d in found.divergences} == {
        ("up:param[weight].grad", ()),
        ("embed:param[weight]", ()),
    }


def test_optimizer_steps_uniformly_scaled_gradients_are_one_divergence(golden: Path, tmp_path: Path) -> None:
    def scale(net: Net, optimizer: torch.optim.Optimizer) -> None:
        for parameter in net.parameters():
            parameter.register_hook(lambda gradient: 3.0 * gradient)

    found = report(golden, train(tmp_path / "other", patch=scale))
    assert len(found.divergences) == 1
    assert found.divergences[0].site.endswith(".grad")
    assert "more modules of 4 differ, too: the cause is what they share (the optimizer, the clip" in "\n".join(
        answer(found)
    )


def test_optimizer_steps_untrained_parameter_is_the_only_one_named(golden: Path, tmp_path: Path) -> None:
    def forget(net: Net, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p is not net.up.weight]

    found = report(golden, train(tmp_path / "other", patch=forget))
    assert [(d.module, d.site, d.step) for d in found.divergences] == [("up", "up:param[weight]", 0)]


def test_optimizer_steps_halved_gradient_is_named_before_its_parameter(golden: Path, tmp_path: Path) -> None:
    def halve(net: Net, optimizer: torch.optim.Optimizer) -> None:
        net.up.weight.register_hook(lambda gradient: 0.5 * gradient)

    first = report(golden, train(tmp_path / "other", patch=halve)).first_divergence
    assert first is not None
    assert (first.site, first.step) == ("up:param[weight].grad", 0)


def test_optimizer_steps_update_error_is_a_share_of_the_update() -> None:
    moved = ErrorDistribution(8, (1e-2, 2e-2, 3e-2, 4e-2), 0.0, 0.0, 0.0, peak=0.1, width=16)
    drift = ParameterUpdate(0, NO_ERROR, moved)
    once = error_of_updates([((0.1,) * 4, drift)])
    assert once.errors == pytest.approx((1e-3, 2e-3, 3e-3, 4e-3))
    assert error_of_updates([((0.1,) * 4, drift)] * 3).errors == pytest.approx([3 * e for e in once.errors])
    assert once.peak == pytest.approx(0.1 * 0.4)  # one element may have the whole error of a row
    assert error_of_updates([]) == NO_ERROR


@pytest.mark.parametrize("num_steps", [2, 3, 5, 8, 33])
def test_optimizer_steps_first_steps_are_the_fewest_that_differ(num_steps: int) -> None:
    steps = [10 * i for i in range(num_steps)]
    for bad in [*steps, 10**6]:
        asked: list[int] = []

        def judge(last: int, bad: int = bad, asked: list[int] = asked) -> tuple[list[Finding], list[Divergence]]:
            asked.append(last)
            finding = Finding(PairResult(Pair(None, None), "a:out", PairMeta()), Verdict.DIFFERS)
            divergence = Divergence("a", "a:out", finding, last, None, "close", "")
            return ([finding], [divergence]) if last >= bad else ([], [])

        divergences = beginning(steps, judge)[1]
        # A difference in the last step only is already part of the verdict on all steps.
        assert [d.step for d in divergences] == ([bad] if bad < steps[-1] else [])
        assert len(asked) == len(set(asked)) <= 2 * np.log2(num_steps) + 2


def test_optimizer_steps_gradient_of_an_insensitive_input_is_a_known_weakness() -> None:
    assert weakness(10.0, [10.0, 3.0]) == 1.0
    assert weakness(2.0, [10.0, 3.0]) == 5.0
    assert weakness(0.0, [10.0]) == 1.0  # unknown
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(2), requires_grad=True)
    y = nn.functional.layer_norm(x, (32,))
    y.retain_grad()
    (y * torch.randn(64, 32, generator=torch.Generator().manual_seed(3)) + 3 * y.detach() * y).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    effects = [float(v.norm() * g.norm()) for v, g in ((x.detach(), x.grad), (y.detach(), y.grad))]
    assert weakness(effects[0], effects[1:]) > 2.5  # a norm removes the component along its output


def test_optimizer_steps_momentum_error_follows_its_gradients(tmp_path: Path) -> None:
    """Embedding rows whose tokens occur in the first step only keep moving by momentum, including its error."""
    draw = np.random.default_rng(3)
    start = draw.standard_normal((64, 24)).astype(np.float32)
    gradient = np.where(np.arange(64)[:, None] < 20, draw.standard_normal((64, 24)), 0.0).astype(np.float32)
    noise = 1.0 + 0.02 * draw.standard_normal(gradient.shape).astype(np.float32)
    for name, first in (("b", gradient), ("t", gradient * noise)):
        weight, moved = start.copy(), np.zeros_like(start)
        with RunFactory(tmp_path / name) as run:
            for step in range(4):
                run.step(phase="train")
                here = first if step == 0 else np.zeros_like(first)
                moved = 0.9 * moved + here
                weight = (weight - 0.05 * moved).astype(np.float32)
                run.put("embed:param[weight].grad", here)
                run.put("embed:param[weight]", weight)
    found = report(tmp_path / "b", tmp_path / "t")
    weights = next(f for f in found.findings if f.site == "embed:param[weight]")
    assert weights.verdict is Verdict.CLOSE
    assert weights.error > 0.0


def test_optimizer_steps_growing_parameter_is_compared_step_by_step(tmp_path: Path) -> None:
    """An embedding grows if the vocabulary is extended; earlier gradients then have a different number of rows."""
    draw = np.random.default_rng(5)
    steps = [draw.standard_normal((num, 8)).astype(np.float32) for num in (4, 6)]
    for name, error in (("b", 0.0), ("t", 1e-6)):
        with RunFactory(tmp_path / name) as run:
            for values in steps:
                run.step(phase="train")
                here = values * (1.0 + error * draw.standard_normal(values.shape)).astype(np.float32)
                run.put("embed:param[weight]", here)
                run.put("embed:param[weight].grad", here)
    found = report(tmp_path / "b", tmp_path / "t")
    assert [(f.site, f.verdict) for f in found.findings] == [
        ("embed:param[weight]", Verdict.CLOSE),
        ("embed:param[weight].grad", Verdict.CLOSE),
    ]
    assert found.exit_code == 0


def test_trainings_without_their_parameters_ask_for_them(tmp_path: Path) -> None:
    def change(net: Net, _: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            net.up.weight.add_(torch.randn(64, 32, generator=torch.Generator().manual_seed(2)) * 0.01)

    for params in (False, True):
        runs = [train(tmp_path / f"{params}{patch is None}", patch=patch, params=params) for patch in (None, change)]
        found = report(*runs)
        assert found.first_divergence is not None
        assert found.first_divergence.module == "up"
        why = answer(found)[2]
        assert why.endswith("; the weights may differ: record both runs with params=true to compare them") is not params
