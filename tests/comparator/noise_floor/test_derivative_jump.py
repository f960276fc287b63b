"""Kinks of ReLU: a gradient element is zero in one run only, because its value is within rounding of 0."""

from pathlib import Path
from typing import Any

import pytest
import torch
from residual_net import ResidualNet, train_residual_net

from tapscope.comparator import CompareOptions, Verdict, compare

HOW: dict[str, Any] = {"shape": (4, 24), "mean": 1.0}


def test_derivative_jump_explains_elements_that_change_sides(tmp_path: Path) -> None:
    """The seeds for which a value changes sides depend on the processor."""
    for seed in (3, 6, 1, 2, 4, 5, 7, 8, 9, 10):
        runs = (
            train_residual_net(tmp_path / f"a{seed}", seed, **HOW),
            train_residual_net(tmp_path / f"b{seed}", seed, channels_last=True, **HOW),
        )
        report = compare(*runs, CompareOptions(explain_floor=("**:out.grad",)))
        assert report.exit_code == 0, report.first_divergence
        if compare(*runs, CompareOptions(disabled=frozenset({"kink_crossings"}))).exit_code == 1:
            said = [effect.explanation for f in report.findings for effect in f.floor_effects]
            assert any("are zero in exactly one run" in each for each in said)
            return
    pytest.fail("no seed needs the effect")


class _CoarseReLU(torch.autograd.Function):
    """ReLU whose backward also zeroes elements below a threshold."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, threshold: float) -> torch.Tensor:
        ctx.save_for_backward(x > threshold)
        return torch.relu(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (mask,) = ctx.saved_tensors
        return gradient * mask, None


def test_derivative_jump_does_not_explain_more_elements_than_the_errors_reach(tmp_path: Path) -> None:
    def harm(net: ResidualNet) -> None:
        net.blocks[1].act.forward = lambda x: _CoarseReLU.apply(x, 0.02)  # type: ignore[assignment,union-attr]

    baseline = train_residual_net(tmp_path / "a", 6)
    report = compare(baseline, train_residual_net(tmp_path / "b", 6, channels_last=True, patch=harm))
    first = report.first_divergence
    assert first is not None
    assert first.module in ("blocks.1.act", "blocks.1.bn1")


def test_derivative_jump_leaves_typical_rows_to_their_floor(tmp_path: Path) -> None:
    def harm(net: ResidualNet) -> None:
        net.blocks[0].conv2.register_full_backward_hook(lambda module, given, made: (given[0] * 1.05,))

    baseline = train_residual_net(tmp_path / "a", 6)
    report = compare(baseline, train_residual_net(tmp_path / "b", 6, channels_last=True, patch=harm))
    assert report.first_divergence is not None
    assert report.first_divergence.module == "blocks.0.conv2"
    assert any(f.verdict is Verdict.DIFFERS for f in report.findings)
