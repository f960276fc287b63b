"""Parameter gradients compared with the sums and products that they equal, where the floor is too wide."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare_runs import diff
from factories import RunFactory
from torch import nn

from tapscope import Dumper
from tapscope.core.observe import RowSpan

ROWS = 48
WRONG = {"bias": "1:param[bias].grad", "weight": "0:param[weight].grad"}
"""Kind of the wrong parameter -> the site of its gradient."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 40), nn.Linear(40, 24))


def damaged(grad: torch.Tensor) -> torch.Tensor:
    """Reduce a bias gradient by a quarter, or one row of a weight gradient by a sixth: within the rounding of
    cancelling sums."""
    if grad.dim() == 1:
        return grad * 0.75
    rows = torch.ones(len(grad), 1, dtype=grad.dtype)
    rows[7] = 0.84
    return grad * rows


def backward(
    path: Path, dtype: torch.dtype = torch.float32, *, wrong: str = "", scale: float = 1.0, batches: int = 1
) -> Path:
    """Capture one step in ``dtype`` with one damaged parameter gradient; clipping divides all gradients by
    ``scale``."""
    model = net().to(dtype)
    if wrong:
        getattr(model[int(WRONG[wrong][0])], wrong).register_hook(damaged)
    x = torch.randn(48, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    with Dumper(model, path, keep="full", grads=True, params=True) as dumper:
        for i, part in enumerate(x.chunk(batches)):
            with dumper.step():
                y = model(part)
                # The gradients of deviations from the mean cancel over rows.
                ((y - y.detach().mean(0)).float().square().sum() * scale).backward()
                if i == batches - 1 and scale != 1.0:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return backward(tmp_path_factory.mktemp("identities") / "fp32")


@pytest.mark.parametrize("what", WRONG)
def test_gradient_identity_violation_within_the_floor_is_named(what: str, base: Path, tmp_path: Path) -> None:
    report = diff(base, backward(tmp_path / what, torch.bfloat16, wrong=what))
    first = report.first_divergence
    assert first is not None
    assert (first.finding.site, first.finding.test) == (WRONG[what], "gradient_identity")
    assert [f.site for f in report.findings if f.verdict.is_bad] == [WRONG[what]]
    assert "out.grad" in first.finding.notes[0]


@pytest.mark.parametrize("how", [{}, {"scale": 64.0}, {"batches": 3}], ids=["bf16", "scaled and clipped", "in parts"])
def test_gradient_identity_violated_by_all_gradients_blames_none(
    how: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    report = diff(base, backward(tmp_path / "t", torch.bfloat16, **how))
    assert [f.site for f in report.findings if f.test == "gradient_identity"] == []


def cancelling(path: Path, error: float, *, harm: float = 1.0, shared: float = 0.0) -> Path:
    """Write four linear maps, the last of which has gradients that cancel.

    Its output gradients are nearly orthogonal to its inputs and have a sum near zero. All output gradients have a
    relative error ``error``, plus ``shared``, which is the same in all rows.
    """
    rng = np.random.default_rng(3)
    with RunFactory(path) as run:
        run.step(grid=(ROWS,), rows=[RowSpan("a", 0, ROWS, 0, 0)], token_ids=range(ROWS))
        for name in "abcd":
            x, dy = rng.standard_normal((2, ROWS, 24))
            if name == "d":
                terms = np.hstack([x, np.ones((ROWS, 1))])
                dy += (2e-4 - 1.0) * (terms @ np.linalg.lstsq(terms, dy, rcond=None)[0])
            dy = (dy * (1.0 + error * rng.standard_normal(dy.shape)) + shared).astype(np.float32)
            x = x.astype(np.float32)
            weight = dy.T @ x
            weight[5] *= harm if name == "d" else 1.0
            run.site(f"{name}:out", params={"weight": (24, 24), "bias": (24,)})
            run.put(f"{name}:in[input]", x)
            run.put(f"{name}:out", x)
            run.put(f"{name}:out.grad", dy)
            run.put(f"{name}:param[weight].grad", weight)
            run.put(f"{name}:param[bias].grad", dy.sum(0))
    return path


@pytest.mark.parametrize(("harm", "named"), [(1.0, None), (1.5, "d")])
def test_gradient_identity_cancelling_sum_is_not_blamed(tmp_path: Path, harm: float, named: str | None) -> None:
    report = diff(cancelling(tmp_path / "b", 0.0), cancelling(tmp_path / "t", 3e-7, harm=harm))
    found = next(f for f in report.findings if f.site == "d:param[weight].grad")
    assert (found.judged_by == "gradient_identity") is (named is None)
    assert (report.first_divergence.module if report.first_divergence else None) == named


@pytest.mark.parametrize("shared", [0.0, 1e-6], ids=["each row its own", "all rows alike"])
def test_gradient_identity_common_row_error_is_not_cancellation(tmp_path: Path, shared: float) -> None:
    report = diff(cancelling(tmp_path / "b", 0.0), cancelling(tmp_path / "t", 1e-6, shared=shared))
    found = {f.site: f for f in report.findings}
    assert not found["d:out.grad"].verdict.is_bad
    bias = found["d:param[bias].grad"]
    assert (bias.verdict.is_bad, bias.judged_by) == ((True, "rounding") if shared else (False, "gradient_identity"))


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_gradient_identity_of_a_norm_weight_uses_the_normalised_input(kind: type[nn.Module], tmp_path: Path) -> None:
    def run(path: Path, dtype: torch.dtype, factor: float) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 32), kind(32), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 40))
        nn.init.normal_(model[1].weight, 1.0, 0.3)
        model.to(dtype)[1].weight.register_hook(lambda grad: grad * factor)
        x = torch.randn(ROWS, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
        with Dumper(model, path, keep="full", grads=True, params=True) as dumper, dumper.step():
            y = model(x)
            (y - y.detach().mean(0)).float().square().sum().backward()
        return path

    base = run(tmp_path / "b", torch.float32, 1.0)
    assert diff(base, run(tmp_path / "same", torch.bfloat16, 1.0)).num_bad == 0
    report = diff(base, run(tmp_path / "t", torch.bfloat16, 0.78))
    assert [(f.site, f.test) for f in report.findings if f.verdict.is_bad] == [
        ("1:param[weight].grad", "gradient_identity")
    ]
