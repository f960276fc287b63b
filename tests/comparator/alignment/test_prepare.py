"""Pairs with one shape key are prepared once, with the result of preparing each by itself."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from comparator_toy import Toy, weights
from compare_runs import diff
from factories import RunFactory
from hypothesis import given, settings
from hypothesis import strategies as st

from tapscope.comparator import CompareOptions, compare
from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.report.json_lines import lines
from tapscope.core.observe import RowSpan
from tapscope.run_format.run import Run
from tapscope.sources import open_run

PROMPTS = {"0": list(range(7)), "1": list(range(30, 35)), "2": [3, 1, 4, 1, 5]}


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pair shares a shape key: each is prepared, read and measured by itself."""
    monkeypatch.setattr(PairPreparer, "shape_key", lambda self, pair: None)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prepare_is_independent_of_earlier_pairs(
    tmp_path: Path, tp: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = weights(layers=3)
    hook = {"model.layers.1.mlp.up_proj:out": lambda value: value * 1.5}
    with (
        Toy(tables, padded=True).write(tmp_path / "b", PROMPTS, steps=[4]) as one,
        Toy(tables, dtype, tp=tp, hooks=hook).write(tmp_path / "t", PROMPTS, steps=[3]) as two,
    ):
        known = list(lines(compare(one, two, CompareOptions(detail=True))))
        alone(monkeypatch)
        assert known == list(lines(compare(one, two, CompareOptions(detail=True))))


def ranks(path: Path, other: dict[int, np.ndarray[Any, Any]]) -> Run:
    """Two sites of one shape on two ranks: one holds the same on both, of the other rank 1 holds ``other``."""
    rows = [RowSpan("0", 0, 4, 0, 0)]
    value = np.random.default_rng(0).standard_normal((4, 6)).astype(ml_dtypes.bfloat16)
    with RunFactory(path, mesh={"tp": 2}) as run:
        run.step(grid=(4,), rows=rows, token_ids=[1, 2, 3, 4])
        run.put("a:out", {0: value, 1: value}, dims="t h # tp:replicated")
        run.put("b:out", {0: value, 1: value} | other, dims="t h # tp:replicated")
    return open_run(path)


def test_prepare_does_not_reuse_replication_across_sites_with_unequal_bytes(tmp_path: Path) -> None:
    found = {
        f.site: f
        for f in diff(
            ranks(tmp_path / "b", {}), ranks(tmp_path / "t", {1: np.ones((4, 6), ml_dtypes.bfloat16)})
        ).findings
    }
    assert found["a:out"].verdict.value == "same"
    assert found["b:out"].test == "replicas"


ODD = ("nothing", "nan", "inf", "permuted", "equal", "stats", "far", "zero")
DTYPES = (("float32", "bfloat16"), ("bfloat16",) * 2, ("float64", "float32"), ("int64",) * 2, ("complex64",) * 2)


def changed(values: np.ndarray[Any, Any], what: str, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """The target's values beside the baseline's."""
    found = (
        values.copy() if what in ("equal", "stats") else values + np.float32(0.01) * rng.standard_normal(values.shape)
    )
    if what == "permuted":
        return np.asarray(values[::-1])
    if what in ("nan", "inf"):
        found[1, 2] = np.nan if what == "nan" else np.inf
    return found * {"far": 3.0, "zero": 0.0}.get(what, 1.0)


@given(
    st.lists(st.tuples(st.sampled_from(ODD), st.integers(0, 1)), min_size=4, max_size=12),
    st.sampled_from(DTYPES),
    st.sampled_from([(5, 4), (9, 6), (2, 1)]),
    st.integers(1, 3),
    st.sampled_from([600, 1 << 27]),
)
@settings(max_examples=25)
@np.errstate(all="ignore")
def test_prepare_batched_pairs_give_the_results_of_single_pairs(
    sites: list[tuple[str, int]], kinds: tuple[str, str], shape: tuple[int, int], steps: int, segment_bytes: int
) -> None:
    rng, rows = np.random.default_rng(len(sites)), shape[0]
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        with RunFactory(Path(folder, "b")) as base, RunFactory(Path(folder, "t")) as target:
            base.writers[0]._segment_bytes = segment_bytes  # in several files, or one
            for step in range(steps):
                for run in (base, target):
                    told = [RowSpan("0", step * rows, rows, 0, 0)]
                    run.step(grid=(rows,), rows=told, token_ids=range(rows))
                for i, (what, form) in enumerate(sites):
                    values = rng.standard_normal((rows, shape[1] + form))
                    pair = values, changed(values, what, rng) if shape[1] + form > 2 else values
                    for run, one, dtype in zip((base, target), pair, kinds, strict=True):
                        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
                        run.put(
                            f"layers.{i}.a:out",
                            one.astype(kind),
                            dims="t h",
                            keep="stats" if what == "stats" else "full",
                        )
        with open_run(Path(folder, "b")) as one, open_run(Path(folder, "t")) as two:
            together = list(lines(compare(one, two)))
            alone(monkeypatch)
            assert together == list(lines(compare(one, two)))
