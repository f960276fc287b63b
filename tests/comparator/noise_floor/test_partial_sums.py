"""Partial sums per rank: each part is rounded relative to its own size, even if the parts cancel."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory

from tapscope.comparator import CompareOptions, Report
from tapscope.comparator.options.overrides import parse_dims
from tapscope.core.observe import RowSpan

ROWS, WIDTH, OUT = 64, 32, 48
SITE = "layers.0.down_proj:out"
Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
X = RNG.standard_normal((ROWS, WIDTH)).astype(np.float32)
Y = (X @ RNG.standard_normal((OUT, WIDTH)).T.astype(np.float32) / np.float32(WIDTH**0.5)).astype(np.float32)
APART = RNG.standard_normal(Y.shape).astype(np.float32)


def write(path: Path, x: Array, out: Array | dict[int, Array], mesh: dict[str, int] | None, dims: str | None) -> Path:
    with RunFactory(path, mesh=mesh) as run:
        run.step(grid=(ROWS,), rows=[RowSpan("a", 0, ROWS, 0, 0)], token_ids=list(range(ROWS)))
        run.site(SITE, params={"weight": (OUT, WIDTH)})
        run.put("layers.0.down_proj:in[input]", x if mesh is None else dict.fromkeys((0, 1), x))
        run.put(SITE, out, dims=dims)
    return path


def compared(tmp_path: Path, apart: float, *, declared: bool = True, wrong: Array | float = 0.0) -> Report:
    """Compare a float32 value with two bfloat16 partial sums, whose distance is ``apart`` times the size of the
    value."""
    baseline = write(tmp_path / "whole", X, Y, None, None)
    parts = {0: Y / 2 + apart * APART, 1: Y / 2 - apart * APART + wrong}
    narrow = {rank: part.astype(ml_dtypes.bfloat16) for rank, part in parts.items()}
    dims = "t h[tp:partial]" if declared else None
    target = write(tmp_path / "parts", X.astype(ml_dtypes.bfloat16), narrow, {"tp": 2}, dims)
    given = CompareOptions() if declared else CompareOptions(dims=(parse_dims(f"target:{SITE}=t h[tp:partial]"),))
    return diff(baseline, target, given)


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("apart", [1.0, 16.0])
def test_partial_sums_agree_within_the_rounding_of_their_parts(tmp_path: Path, apart: float, declared: bool) -> None:
    report = compared(tmp_path, apart, declared=declared)
    assert report.exit_code == 0, str(report)


def test_partial_sums_that_cancel_say_so_in_their_floor(tmp_path: Path) -> None:
    compared(tmp_path, 16.0)
    report = diff(tmp_path / "whole", tmp_path / "parts", CompareOptions(explain_floor=(SITE,)))
    (finding,) = (each for each in report.findings if each.site == SITE)
    effects = {each.effect: each for each in finding.floor_effects}
    parts = 2 * np.square(16.0 * APART).sum() + np.square(Y).sum() / 2
    assert effects["rank_sum"].contribution == pytest.approx(np.sqrt(parts / np.square(Y).sum()), rel=0.01)
    assert "parts of the sum over ranks cancel" in effects["rank_sum"].explanation
    assert finding.floor < 1.0


@pytest.mark.parametrize("apart", [1.0, 16.0])
def test_partial_sum_of_one_rank_that_is_wrong_is_named(tmp_path: Path, apart: float) -> None:
    report = compared(tmp_path, apart, wrong=0.5 * np.roll(Y, 1, axis=1))
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.site == SITE
