"""Verdicts: distinguish differences from rounding, without any way for a difference to hide."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from compare_runs import diff
from factories import RunFactory
from hypothesis import given, settings
from hypothesis import strategies as st

from tapscope.comparator import Finding, Report, Verdict, compare
from tapscope.comparator.report.table import render
from tapscope.core.errors import NothingInCommonError
from tapscope.core.observe import RowSpan
from tapscope.sources import open_run

RNG = np.random.default_rng(0)


def write(path: Path, value: Any, *, dims: str | None, rows: int, keep: str = "full") -> Path:
    with RunFactory(path) as run:
        if rows:
            run.step(grid=(rows,), rows=[RowSpan("a", 0, rows, 0, 0)], token_ids=[0] * rows)
        else:
            run.step()
        run.put("layers.0.mlp:in[x]", np.ones((max(rows, 1), 4), np.float32), dims="t h" if rows else None)
        run.put("layers.0.mlp:out", value, dims=dims, keep=keep)
    return path


def diff_tensors(
    tmp_path: Path, left: Any, right: Any, *, dims: str | None = "t h", keep: str = "full", **options: Any
) -> Report:
    rows = len(left) if dims and dims.startswith("t") else 0
    return diff(
        write(tmp_path / "b", np.asarray(left), dims=dims, rows=rows, keep=keep),
        write(tmp_path / "t", np.asarray(right), dims=dims, rows=rows, keep=keep),
        **options,
    )


def verdict(*args: Any, **kwargs: Any) -> Finding:
    return next(f for f in diff_tensors(*args, **kwargs).findings if f.site.endswith(":out"))


def normal(rows: int, width: int) -> np.ndarray:
    return RNG.standard_normal((rows, width)).astype(np.float32)


@given(
    st.sampled_from(["float32", "float16", "bfloat16", "int64", "bool", "float8_e4m3fn", "float64"]), st.integers(1, 9)
)
@settings(max_examples=20)
def test_judge_run_is_the_same_as_itself(tmp_path_factory: pytest.TempPathFactory, dtype: str, rows: int) -> None:
    kind = getattr(ml_dtypes, dtype, None) or np.dtype(dtype)
    value = normal(rows, 5).astype(kind)
    report = diff_tensors(tmp_path_factory.mktemp("self"), value, value)
    assert {f.verdict for f in report.findings} == {Verdict.SAME}
    assert {f.basis for f in report.findings} == {"hash"}
    assert report.exit_code == 0


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16, np.float64, ml_dtypes.float8_e4m3fn])
def test_judge_rounding_to_another_dtype_is_close(tmp_path: Path, kind: Any) -> None:
    value = normal(32, 64)
    found = verdict(tmp_path, value, value.astype(kind))
    assert found.verdict in (Verdict.SAME, Verdict.CLOSE)
    assert found.ratio < 1
    assert found.floor > 0 or found.verdict is Verdict.SAME


@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("fault", ["random in 1024", "zeroed in 4096", "scaled by 4 %", "dead channel", "one element"])
def test_judge_local_faults_are_not_diluted(tmp_path: Path, fault: str, kind: Any) -> None:
    value = normal(4096 if "4096" in fault else 1024, 64)
    wrong = value.copy()
    if fault.startswith("random"):
        wrong[700] = normal(1, 64)
    elif fault.startswith("zeroed"):
        wrong[700] = 0
    elif fault.startswith("scaled"):
        wrong *= 1.04
    elif fault.startswith("dead"):
        wrong[:, 17] = 0
    else:
        wrong[700, 17] += 8
    found = verdict(tmp_path, value, wrong.astype(kind))
    assert found.verdict is Verdict.DIFFERS
    if "in 4096" in fault or "in 1024" in fault or fault == "one element":
        assert found.worst is not None
        assert found.worst.position == 700


@pytest.mark.parametrize("kind", ["int64", "uint64"])
def test_judge_integers_beyond_float_precision_are_exact(tmp_path: Path, kind: str) -> None:
    value = np.full((4, 2), 2**53, kind)
    wrong = value.copy()
    wrong[2, 1] += 1
    found = verdict(tmp_path, value, wrong)
    assert found.verdict is Verdict.DIFFERS
    assert found.test == "exact"
    assert found.metrics is not None
    assert found.metrics.max_abs == 1.0


def test_judge_float64_is_not_rounded_to_float32(tmp_path: Path) -> None:
    value = normal(8, 4).astype(np.float64)
    assert verdict(tmp_path, value, value * (1 + 1e-9)).verdict is Verdict.DIFFERS


def test_judge_imaginary_part_counts(tmp_path: Path) -> None:
    value = (normal(8, 4) + 1j * normal(8, 4)).astype(np.complex64)
    assert verdict(tmp_path, value, value.conj()).verdict is Verdict.DIFFERS


def test_judge_nan_is_equal_only_at_the_same_place(tmp_path: Path) -> None:
    value = normal(8, 4)
    value[3, 1] = np.nan
    other = value.copy()
    other[5] *= 1 + 1e-7
    assert verdict(tmp_path, value, other).verdict is Verdict.CLOSE
    other[5, 2] = np.inf
    found = verdict(tmp_path / "inf", value, other)
    assert found.verdict is Verdict.NONFINITE
    assert found.worst is not None
    assert found.worst.position == 5


def test_judge_nan_never_passes_a_tolerance(tmp_path: Path) -> None:
    value = normal(8, 4)
    other = value.copy()
    other[1, 1] = np.nan
    report = diff_tensors(tmp_path, value, other, rtol=1e9)
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.module == "layers.0.mlp"


def test_judge_tolerance_replaces_the_floor(tmp_path: Path) -> None:
    value = normal(8, 4)
    assert diff_tensors(tmp_path / "a", value, value * 1.05, rtol=0.1).exit_code == 0
    assert diff_tensors(tmp_path / "b", value, value * 1.05, rtol=0.01).exit_code == 1
    assert diff_tensors(tmp_path / "c", value, value * (1 + 1e-6), atol=0.0).exit_code == 1


def test_judge_different_widths_report_both_shapes(tmp_path: Path) -> None:
    found = verdict(tmp_path, normal(8, 4), normal(8, 5))
    assert found.verdict is Verdict.SHAPE
    assert "(8, 4) and (8, 5)" in found.notes[0]


def test_judge_separate_and_fused_heads_have_one_width(tmp_path: Path) -> None:
    value = normal(8, 12)
    for name, array, dims in (("b", value, "t h"), ("t", value.reshape(8, 3, 4), "t n d")):
        write(tmp_path / name, array, dims=dims, rows=8)
    assert diff(tmp_path / "b", tmp_path / "t").findings[1].verdict is Verdict.SAME


def test_judge_equal_shapes_without_step_tables_are_compared_whole(tmp_path: Path) -> None:
    value = normal(8, 4)
    report = diff_tensors(tmp_path, value, value * 1.1, dims=None)
    found = report.findings[1]
    assert (found.verdict, found.layout) == (Verdict.DIFFERS, "whole")
    assert found.worst is not None
    assert found.worst.position is None
    assert len(found.worst.index) == 2


def test_judge_statistics_alone_find_a_scale(tmp_path: Path) -> None:
    value = normal(64, 32)
    found = verdict(tmp_path, value, value * 1.02, keep="stats")
    assert (found.verdict, found.basis) == (Verdict.DIFFERS, "stats")
    assert "only statistics" in found.notes[0]
    assert verdict(tmp_path / "close", value, value.astype(ml_dtypes.bfloat16), keep="stats").verdict is Verdict.CLOSE
    assert verdict(tmp_path / "same", value, value, keep="stats").basis == "hash"


def test_judge_empty_tensor_is_no_evidence(tmp_path: Path) -> None:
    for name in ("b", "t"):
        with RunFactory(tmp_path / name) as run:
            run.step()
            run.put("norm:out", np.empty((0, 4), np.float32))
    with open_run(tmp_path / "b") as one, open_run(tmp_path / "t") as two, pytest.raises(NothingInCommonError):
        compare(one, two)


def test_judge_boolean_mask_matches_an_additive_one(tmp_path: Path) -> None:
    mask = np.tril(np.ones((6, 6), bool))
    added = np.where(mask, 0, np.finfo(np.float32).min).astype(np.float32)
    assert verdict(tmp_path, mask, added).verdict is Verdict.SAME
    added[4, 2] = np.finfo(np.float32).min
    assert verdict(tmp_path / "wrong", mask, added).verdict is Verdict.DIFFERS


def test_judge_unreadable_payload_is_reported(tmp_path: Path) -> None:
    value = normal(8, 4)
    for name, factor in (("b", 1.0), ("t", 1.1)):
        write(tmp_path / name, value * np.float32(factor), dims="t h", rows=8)
    (segment,) = (tmp_path / "t").glob("rank-*/seg-*")
    with segment.open("r+b") as file:
        file.truncate(segment.stat().st_size - 64)
    report = diff(tmp_path / "b", tmp_path / "t")
    assert [f.verdict for f in report.findings] == [Verdict.SAME, Verdict.ONLY_BASELINE]
    assert "t is damaged, 1 record left out" in report.coverage.damaged[0]
    assert report.exit_code == 3


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_judge_differences_are_nan_where_one_run_alone_is_not_finite(tmp_path: Path, odd: float) -> None:
    value = normal(4, 8)
    wrong = value.copy()
    wrong[1, 3] = odd
    report = diff_tensors(tmp_path, value, wrong)
    found = next(f for f in report.findings if f.site.endswith(":out"))
    assert found.verdict is Verdict.NONFINITE
    assert found.metrics is not None
    metrics = found.metrics
    assert all(map(np.isnan, (metrics.max_abs, metrics.mean_abs, metrics.rel_l2, metrics.rel, metrics.cosine)))
    assert (metrics.num_nonfinite_mismatch, metrics.num_equal) == (1, 31)
    assert np.isnan(found.steps[0].max_abs)
    with pytest.raises(AssertionError, match="nan|inf"):
        torch.testing.assert_close(torch.from_numpy(wrong), torch.from_numpy(value))
    (row,) = (line.plain for line in render(report) if line.plain.startswith("% layers.0.mlp:out"))
    assert row.split()[4:6] == ["nan", "nan"]


def test_judge_differences_are_numbers_where_both_runs_are_not_finite(tmp_path: Path) -> None:
    value = normal(4, 8)
    value[1, 3], value[2, 0] = np.nan, -np.inf
    wrong = value.copy()
    wrong[0, 0] += 1
    found = verdict(tmp_path, value, wrong)
    assert found.verdict is Verdict.DIFFERS
    assert found.metrics is not None
    assert found.metrics.max_abs == pytest.approx(1)
    assert found.metrics.num_nonfinite_mismatch == 0
