"""Reasons why gradients round worse than values, each tested with real rounding."""

from pathlib import Path

import numpy as np
import pytest
import torch
from compare_runs import diff
from torch import nn

from tapscope import Dumper
from tapscope.comparator.metrics.error_columns import LargestErrors
from tapscope.comparator.metrics.error_distribution import ErrorDistribution, error_distribution_of, row_sizes_of
from tapscope.comparator.noise_floor.float16_underflow import underflow_error
from tapscope.comparator.noise_floor.local_rounding import rounding_error
from tapscope.comparator.noise_floor.row_concentration import cancellation, spilled
from tapscope.kernels.native import overview
from tapscope.kernels.native.compare import compare_rows

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
RNG = np.random.default_rng(0)


def spread(baseline: Array, target: Array) -> ErrorDistribution:
    """Return the error distribution of a measured gradient."""
    rows = compare_rows(baseline.astype(np.float64), target.astype(np.float64))
    at_worst = baseline[np.arange(len(baseline)), rows.argmax]
    return error_distribution_of(overview(rows, at_worst), sizes=row_sizes_of(rows))


@pytest.mark.parametrize("size", [1e-3, 1e-5, 1e-6])
def test_gradients_small_values_underflow_in_float16(size: float) -> None:
    values = RNG.standard_normal((200, 64)) * size
    found = spread(values, values.astype(np.float16).astype(np.float64))
    explained = np.hypot(rounding_error("float16", "float16", 1), underflow_error(("float16",), found))
    assert 0.5 < explained / found.errors[0] < 4.0
    assert underflow_error(("bfloat16",), found) < 1e-20


def test_gradients_cancelling_sum_is_worse_conditioned() -> None:
    tokens = RNG.standard_normal((64, 32))
    tokens -= 0.99 * tokens.mean(0)  # leaves a hundredth of the sum
    noisy = tokens * (1 + 0.01 * RNG.standard_normal(tokens.shape))
    given, total = spread(tokens, noisy), spread(tokens.sum(0)[None], noisy.sum(0)[None])
    cancels = cancellation(float(np.linalg.norm(tokens.sum(0))), [float(np.linalg.norm(tokens))])
    explained = cancels * given.errors[0]
    assert 50 < cancels < 200
    assert 0.3 < explained / total.errors[0] < 3.0


def test_gradients_error_of_a_large_row_reaches_a_small_one() -> None:
    rows = RNG.standard_normal((40, 32))
    rows[::4] *= 0.25
    noisy = rows + 0.01 * np.linalg.norm(rows, axis=1).max() * RNG.standard_normal(rows.shape) / np.sqrt(32)
    mixed = spread(rows, noisy)
    before = ErrorDistribution(40, (0.01, 0.011, 0.012, 0.012), 0.01, 0.0, 0.0, 0.03)
    assert spilled(before).errors[-1] == pytest.approx(0.04)
    assert before.errors[-1] < mixed.errors[-1] < 2 * spilled(before).errors[-1]


class Block(nn.Module):
    """A norm and a linear map with a residual, whose gradient is doubled if ``broken``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.up = nn.Linear(24, 24)
        self.broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.up(self.norm(x))
        return y + (x - x.detach()) if self.broken else y


def test_gradients_residual_added_twice_blames_the_adding_module(tmp_path: Path) -> None:
    for name in ("b", "t"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(24, 24), Block(), nn.Linear(24, 8))
        net[1].broken = name == "t"
        with Dumper(net, tmp_path / name, keep="full", grads=True, params=True) as dumper, dumper.step():
            net(torch.randn(20, 24)).square().sum().backward()
    first = diff(tmp_path / "b", tmp_path / "t").first_divergence
    assert first is not None
    assert first.explanation is not None
    assert first.explanation.name == "summand"
    assert (first.module, first.alternatives) == ("1", ())


def test_gradients_sum_over_rows_has_the_gain_of_its_large_rows() -> None:
    baseline = RNG.standard_normal((200, 16))
    baseline[3] *= 30.0
    target = baseline * (1.0 + 1e-3 * RNG.standard_normal((200, 1)))
    target[3] = baseline[3] * 1.3
    pairs = (baseline[4:], target[4:]), (baseline, target), (baseline, baseline * 1.3)
    even, uneven, alike = LargestErrors.of([[spread(*pair)] for pair in pairs]).gain_sd
    assert even < 2e-3
    assert 0.1 < uneven < 0.3
    assert alike < 1e-9  # an equal gain of all rows has no deviation


class Detached(nn.Linear):
    """A linear map that propagates no gradient if ``broken``."""

    broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y.detach() + 0.0 * y if self.broken else y


class Gates(nn.Module):
    """Three linear maps of the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.one, self.two, self.three = (Detached(24, 24) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.one(x).tanh() * self.two(x) + self.three(x)


@pytest.mark.parametrize("broken", ["one", "two", "three"])
def test_gradients_consumer_with_a_wrong_parameter_gradient_is_named(tmp_path: Path, broken: str) -> None:
    for name in ("b", "t"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(24, 24), Gates(), nn.Linear(24, 8))
        getattr(net[1], broken).broken = name == "t"
        with Dumper(net, tmp_path / name, keep="full", grads=True, params=True) as dumper, dumper.step():
            net(torch.randn(20, 24)).square().sum().backward()
    report = diff(tmp_path / "b", tmp_path / "t")
    first = report.first_divergence
    assert first is not None
    assert (first.module, first.alternatives) == (f"1.{broken}", ())
    assert f"only 1.{broken} has a parameter with a wrong gradient of its own" in first.evidence
    assert len(report.divergences) == 1
