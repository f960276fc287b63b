"""Shards are put back together by dims and mesh, and what no dims explain is said."""

import shlex
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_tensors import deal

from tapscope.comparator import CompareOptions, Finding, Verdict, compare
from tapscope.comparator.options.overrides import parse_dims
from tapscope.comparator.report.answer import answer
from tapscope.core.dims import parse
from tapscope.core.observe import RowSpan
from tapscope.sources import open_run

ROWS = 6


def finding(
    path: Path, whole: Any, parts: dict[int, Any], dims: str | None, mesh: dict[str, int], keep: str = "full"
) -> Finding:
    """Compare one site: ``whole`` on one rank against ``parts`` on several."""
    for name, values, said, layout in (("b", {0: whole}, "t h", {}), ("t", parts, dims, mesh)):
        with RunFactory(path / name, mesh=layout) as run:
            run.step(grid=(ROWS,), rows=[RowSpan("a", 0, ROWS, 0, 0)], token_ids=range(ROWS))
            axes = {1: "t", 2: "t h", 3: "t n d"}[np.asarray(whole).ndim] if said == "t h" else said
            run.put("layers.0.mlp:out", values, dims=axes, keep=keep)
            run.put("norm:out", np.ones((ROWS, 2), np.float32), dims="t h")
    return diff(path / "b", path / "t").findings[0]


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@given(st.integers(1, 4), st.integers(1, 5), st.sampled_from(["t h[tp]", "t h[tp] d", "t n d[tp]", "t[tp] h"]))
@settings(max_examples=25)
def test_assemble_merges_shards_into_the_whole(
    tmp_path_factory: pytest.TempPathFactory, size: int, width: int, dims: str
) -> None:
    axes = dims.split()
    axis = next(i for i, name in enumerate(axes) if "[tp]" in name)
    shape = [ROWS, *(3 for _ in axes[1:])]
    if axis:
        shape[axis] = width * size
    whole = values(*shape)
    parts = dict(enumerate(np.array_split(whole, size, axis=axis)))
    found = finding(tmp_path_factory.mktemp("split"), whole, parts, dims, {"tp": size})
    assert found.verdict is Verdict.SAME
    assert found.rows.num_compared == ROWS
    assert found.metrics is not None
    assert found.metrics.num_equal == found.metrics.num_elements == whole.size


@given(st.integers(2, 4), st.sampled_from([np.float32, np.float64]))
@settings(max_examples=10)
def test_assemble_adds_partial_sums(
    tmp_path_factory: pytest.TempPathFactory, size: int, kind: type[np.floating[Any]]
) -> None:
    parts = {rank: values(ROWS, 8, seed=rank).astype(kind) for rank in range(size)}
    found = finding(tmp_path_factory.mktemp("sum"), sum(parts.values()), parts, "t h[tp:partial]", {"tp": size})
    assert found.verdict in (Verdict.SAME, Verdict.CLOSE)
    assert found.metrics is not None
    assert found.metrics.rel_l2 < 1e-6


def test_assemble_merges_two_mesh_axes_from_the_innermost(tmp_path: Path) -> None:
    whole = values(ROWS, 16)
    quarters = np.split(whole, 4, axis=1)
    found = finding(tmp_path, whole, dict(enumerate(quarters)), "t h[ep,tp]", {"ep": 2, "tp": 2})
    assert found.verdict is Verdict.SAME


def test_assemble_places_a_wrong_column_in_the_whole_tensor(tmp_path: Path) -> None:
    whole = values(ROWS, 8)
    wrong = whole.copy()
    wrong[2, 5] += 10
    found = finding(tmp_path, whole, dict(enumerate(np.split(wrong, 2, axis=1))), "t h[tp]", {"tp": 2})
    assert found.verdict is Verdict.DIFFERS
    assert found.worst is not None
    assert (found.worst.position, found.worst.index, found.worst.rank) == (2, (5,), 1)


@pytest.mark.parametrize(
    ("dims", "mesh"),
    [
        ("t h[tp]", {"tp": 2}),
        ("t[sp] h", {"sp": 3}),
        ("t[cp:zigzag] h", {"cp": 2}),
        ("t[cp:zigzag,sp] h", {"cp": 1, "sp": 2}),
        ("t[dp] h[tp]", {"dp": 2, "tp": 2}),
        ("t (q=8+k=2+v=2)[tp]", {"tp": 2}),
        ("t (q=6+k=3+v=3)/3[tp]", {"tp": 3}),
        ("t h=12[tp]", {"tp": 5}),
    ],
)
def test_assemble_names_the_rank_of_the_bad_element(tmp_path: Path, dims: str, mesh: dict[str, int]) -> None:
    whole = values(ROWS, 12)
    parts = {rank: part.copy() for rank, part in deal(whole, parse(dims), mesh, (ROWS,)).items()}
    parts[1].reshape(-1)[0] += 9
    found = finding(tmp_path, whole, parts, dims, mesh)
    assert found.verdict is Verdict.DIFFERS
    assert found.worst is not None
    assert found.worst.rank == 1


def test_assemble_partial_sums_name_no_rank(tmp_path: Path) -> None:
    whole = values(ROWS, 12)
    parts = deal(whole, parse("t h[tp:partial]"), {"tp": 2})
    parts[1] = parts[1] + 9
    found = finding(tmp_path, whole, parts, "t h[tp:partial]", {"tp": 2})
    assert found.worst is not None
    assert found.worst.rank is None


def test_assemble_reports_a_missing_shard_and_fails(tmp_path: Path) -> None:
    whole = values(ROWS, 8)
    found = finding(tmp_path, whole, {0: whole[:, :4]}, "t h[tp]", {"tp": 2})
    assert found.verdict is Verdict.SHAPE
    assert "shard 1 is missing" in found.notes[0]


def test_assemble_asks_for_dims_of_ranks_that_differ(tmp_path: Path) -> None:
    whole = values(ROWS, 8)
    found = finding(tmp_path, whole, {0: whole, 1: whole + 1}, None, {"tp": 2})
    assert found.verdict is Verdict.SHAPE
    assert "annotate e.g. 't h[tp]'" in found.notes[0]


def test_assemble_equal_ranks_need_no_dims(tmp_path: Path) -> None:
    whole = values(ROWS, 8)
    assert finding(tmp_path, whole, {0: whole, 1: whole}, None, {"tp": 2}).verdict is Verdict.SAME


def test_assemble_fails_on_replicas_that_differ_from_rank_0(tmp_path: Path) -> None:
    whole = values(ROWS, 8)
    other = whole.copy()
    other[3] *= 1.01
    found = finding(tmp_path, whole, {0: whole, 1: other}, "t h # tp:replicated", {"tp": 2})
    assert found.verdict is Verdict.DIFFERS
    assert "replicas over tp differ in t: ranks 0, 1" in found.notes[0]


def test_assemble_points_to_where_replicas_differ(tmp_path: Path) -> None:
    steps = [values(ROWS, 8, seed=seed) for seed in range(4)]
    with RunFactory(tmp_path / "b") as base, RunFactory(tmp_path / "t", mesh={"tp": 2}) as target:
        for i, whole in enumerate(steps):
            rows = [RowSpan("a", ROWS * i, ROWS, 0, 0)]
            other = whole.copy()
            other[3, 5] += 4.0 * (i >= 2)
            for run, value in ((base, whole), (target, {0: whole, 1: other})):
                run.step(grid=(ROWS,), rows=rows, token_ids=range(ROWS))
                run.put("norm:out", value, dims="t h # tp:replicated")
    report = diff(tmp_path / "b", tmp_path / "t")
    assert answer(report)[1] == "where     step 2, rank 1, only column 5 (of rank 1) of 2 of 24 rows; worst at [3,5]"


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "float64"])
def test_assemble_accepts_replicas_within_rounding(tmp_path: Path, kind: str) -> None:
    whole = values(ROWS, 64).astype(np.dtype(getattr(ml_dtypes, kind, kind)))
    other = whole.copy()
    other[::2] = np.nextafter(whole[::2], np.array(np.inf, whole.dtype))
    found = finding(tmp_path, whole, {0: whole, 1: other}, "t h # tp:replicated", {"tp": 2})
    assert found.verdict is Verdict.SAME
    assert any("replicas over tp differ by rounding: ranks 0, 1 at step 0" in note for note in found.notes)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int64", "bool"])
@pytest.mark.parametrize("keep", ["full", "stats"])
def test_assemble_rejects_replicas_beyond_rounding(tmp_path: Path, kind: str, keep: str) -> None:
    whole = (values(ROWS, 64) * 100).astype(np.dtype(getattr(ml_dtypes, kind, kind)))
    scaled = (values(ROWS, 64) * 101).astype(whole.dtype) if kind != "bool" else ~whole
    found = finding(tmp_path, whole, {0: whole, 1: scaled}, "t h # tp:replicated", {"tp": 2}, keep=keep)
    assert found.verdict is Verdict.DIFFERS
    assert "replicas over tp differ in t: ranks 0, 1 at step 0" in found.notes[0]


def test_assemble_names_the_shapes_of_unequal_replicas(tmp_path: Path) -> None:
    whole = values(ROWS, 8)
    found = finding(tmp_path, whole, {0: whole, 1: whole[:, :4]}, "t h # tp:replicated", {"tp": 2})
    assert found.verdict is Verdict.DIFFERS
    assert "have shapes (6, 8) and (6, 4)" in found.notes[0]


def test_assemble_warns_about_identical_partial_sums(tmp_path: Path) -> None:
    whole = values(ROWS, 8)
    found = finding(tmp_path, whole, {0: whole, 1: whole}, "t h[tp:partial]", {"tp": 2})
    assert found.verdict is Verdict.DIFFERS
    assert any("identical" in note and "2 times too large" in note for note in found.notes)


def test_assemble_reports_a_replication_that_cannot_be_checked(tmp_path: Path) -> None:
    whole = values(ROWS, 8)
    path = tmp_path / "sp"
    for name, mesh in (("b", {}), ("t", {"tp": 2})):
        with RunFactory(path / name, mesh=mesh) as run:
            run.step(grid=(ROWS,), rows=[RowSpan("a", 0, ROWS, 0, 0)], token_ids=range(ROWS))
            run.put("norm:out", whole, dims="t h # tp:replicated")
    found = diff(path / "b", path / "t").findings[0]
    assert found.verdict is Verdict.SAME
    assert any("replica" in note and "1 of 2" in note for note in found.notes)


@pytest.mark.parametrize("dims", ["t h x", "t h[tp:zigzag]", "t h # ep:replicated"])
def test_assemble_reports_dims_that_do_not_fit_the_ranks(tmp_path: Path, dims: str) -> None:
    whole = values(ROWS, 8)
    found = finding(tmp_path, whole, dict(enumerate(np.split(whole, 2, axis=1))), dims, {"tp": 2})
    assert found.verdict is Verdict.SHAPE
    assert found.notes[0]


@pytest.mark.parametrize(
    ("truth", "stated", "mesh"),
    [
        ("t h[tp]", None, {"tp": 2}),
        ("t h[tp]", "t h[tp:partial]", {"tp": 2}),
        ("t h[tp]", "t h # tp:replicated", {"tp": 3}),
        ("t h[tp:partial]", None, {"tp": 2}),
        ("t h[tp:partial]", "t h[tp]", {"tp": 2}),
        ("t[sp] h", "t h", {"sp": 2}),
        ("t[cp:zigzag] h", None, {"cp": 2}),
        ("t (h0+h1)[tp]", None, {"tp": 2}),
        ("t (hq=8+hk=2+hv=2)[tp]", None, {"tp": 2}),
        ("t h # tp:replicated", "t h[tp]", {"tp": 2}),
        ("t h[tp,ep]", "t h[tp]", {"tp": 2, "ep": 2}),
        ("t h[tp] # ep:replicated", "t h[tp]", {"tp": 2, "ep": 2}),
        ("t[cp:zigzag] h[tp] # ep:replicated", None, {"cp": 2, "ep": 2, "tp": 2}),
        ("t h=12x2[tp]", None, {"tp": 4}),
        ("t h=12[tp]", None, {"tp": 5}),
    ],
)
def test_assemble_suggests_dims_for_unexplained_shards(
    tmp_path: Path, truth: str, stated: str | None, mesh: dict[str, int]
) -> None:
    whole = values(ROWS, 12)
    parts = deal(whole, parse(truth), mesh, (ROWS,))
    if "replicated" in truth:  # equal bytes need no dims
        parts = {rank: np.nextafter(part, np.float32(rank)) for rank, part in parts.items()}
    found = finding(tmp_path, whole, parts, stated, mesh)
    assert found.verdict is Verdict.SHAPE
    assert f"'{truth}' would fit" in found.notes[0], found.notes[0]
    assert f"--dims 'target:layers.*.mlp:out={truth}'" in found.notes[0]


def test_assemble_suggests_a_size_when_the_other_run_has_no_padding(tmp_path: Path) -> None:
    whole = values(ROWS, 5)
    found = finding(tmp_path, whole, {0: np.pad(whole, [(0, 0), (0, 3)])}, "t h", {})
    assert "'t h=5' would fit (equal values)" in found.notes[0]


def test_assemble_reports_shards_that_no_dims_explain(tmp_path: Path) -> None:
    parts = {rank: values(ROWS, 8, seed=rank + 1) for rank in range(2)}
    found = finding(tmp_path, values(ROWS, 8), parts, None, {"tp": 2})
    assert "no sharding, sum or replication over tp gives the baseline's values" in found.notes[0]


@pytest.mark.parametrize(
    ("truth", "stated"),
    [
        ("t (h0+h1)[tp]", "t h[tp]"),
        ("t[cp:zigzag] h", "t[cp:natural] h"),
        ("t h # tp:replicated", "t h[tp:partial]"),
        ("t (q=8+k=2+v=2)[tp]", "t (q+k+v)[tp]"),
    ],
)
def test_assemble_suggests_the_dims_of_wrongly_merged_shards(tmp_path: Path, truth: str, stated: str) -> None:
    whole, mesh = values(8, 12)[:ROWS], {"cp": 2} if "cp" in truth else {"tp": 2}
    found = finding(tmp_path, whole, deal(whole, parse(truth), mesh, (ROWS,)), stated, mesh)
    assert found.verdict is Verdict.DIFFERS
    assert any(f"joined incorrectly: '{truth}' would fit (equal values)" in note for note in found.notes)


def test_assemble_collects_identical_partial_sums_into_one_warning(tmp_path: Path) -> None:
    whole = values(ROWS, 8)
    finding(tmp_path, whole, {0: whole, 1: whole}, "t h[tp:partial]", {"tp": 2})
    warnings = diff(tmp_path / "b", tmp_path / "t").coverage.warnings
    assert any("layers.0.mlp:out: the 2 summands over tp are identical" in warning for warning in warnings)


def test_assemble_takes_equal_gradients_as_reduced(tmp_path: Path) -> None:
    """Megatron sums the gradients of norms over tp before the optimizer uses them; until then each rank has its own."""
    whole, part = values(8), values(8, seed=1)
    for name, parts in (("b", {0: whole}), ("before", {0: part, 1: whole - part}), ("after", {0: whole, 1: whole})):
        with RunFactory(tmp_path / name, mesh={"tp": 2} if len(parts) > 1 else {}) as run:
            run.step()
            run.put("norm:param[weight].grad", parts, dims="h[tp:partial]" if len(parts) > 1 else "h")
    for name in ("before", "after"):
        report = diff(tmp_path / "b", tmp_path / name)
        assert (report.exit_code, report.coverage.num_sites_matched) == (0, 1), report


def test_assemble_suggests_the_mesh_axes_that_distinguish_the_ranks(tmp_path: Path) -> None:
    """On SGLang tp = attn_dp x attn_tp: three axes differ, and two are enough."""
    whole = values(ROWS, 8)
    mesh = {"attn_dp": 2, "attn_tp": 2}
    parts = deal(whole, parse("t[attn_dp] h[attn_tp]"), mesh)
    found = finding(tmp_path, whole, parts, None, mesh)
    assert "'t[attn_dp] h[attn_tp]' would fit (equal values)" in found.notes[0]


@pytest.mark.parametrize(
    ("site", "axis", "num_ranks", "truth"),
    [
        ("layers.0.mlp.up_proj:param[weight]", 1, 2, "i o[tp]"),
        ("layers.0.mlp.up_proj:param[weight]", 0, 2, "i[tp] o"),
        ("layers.0.mlp.up_proj:param[weight]", 0, 1, "i o"),
        ("layers.0.mlp.up_proj:out", 0, 2, "h[tp] t"),
    ],
)
def test_assemble_suggests_dims_of_both_runs_for_transposed_shards(
    tmp_path: Path, site: str, axis: int, num_ranks: int, truth: str
) -> None:
    whole = values(ROWS + 1, 12)
    with RunFactory(tmp_path / "b") as run:
        run.step()
        run.put("norm:out", whole)
        run.put(site, whole)
    with RunFactory(tmp_path / "t", mesh={"tp": num_ranks}) as run:
        run.step()
        run.put("norm:out", whole)
        run.put(site, dict(enumerate(np.array_split(whole.T, num_ranks, axis))))
    with open_run(tmp_path / "b") as one, open_run(tmp_path / "t") as two:
        found = compare(one, two).findings[1]
        assert found.verdict is Verdict.SHAPE
        (note,) = found.notes
        assert f"its axes are in another order, '{truth}' would fit (equal values)" in note
        flags = shlex.split(note[note.index("--dims") :])
        dims = tuple(map(parse_dims, flags[1::2]))
        found = compare(one, two, CompareOptions(dims=dims)).findings[1]
    assert found.verdict is Verdict.SAME
