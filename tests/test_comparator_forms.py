"""Pairs of one form are prepared once: what comes of it is what preparing each by itself gives."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from comparator_toy import Toy, weights
from factories import RunFactory

from tapscope.comparator import CompareOptions, compare
from tapscope.comparator.prepare import Preparer
from tapscope.comparator.report.json import lines
from tapscope.observe import RowRun
from tapscope.run import Run, open_run

PROMPTS = {"0": list(range(7)), "1": list(range(30, 35)), "2": [3, 1, 4, 1, 5]}


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = Preparer.prepare

    def forgetful(self: Preparer, pair: Any) -> Any:
        self._known.clear()
        return prepare(self, pair)

    monkeypatch.setattr(Preparer, "prepare", forgetful)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reports_do_not_depend_on_what_was_prepared_before(
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
    rows = [RowRun("0", 0, 4, 0, 0)]
    value = np.random.default_rng(0).standard_normal((4, 6)).astype(ml_dtypes.bfloat16)
    with RunFactory(path, mesh={"tp": 2}) as run:
        run.step(grid=(4,), rows=rows, token_ids=[1, 2, 3, 4])
        run.put("a:out", {0: value, 1: value}, dims="t h # tp:replicated")
        run.put("b:out", {0: value, 1: value} | other, dims="t h # tp:replicated")
    return open_run(path)


def test_ranks_that_hold_other_bytes_are_no_replicas_because_those_of_a_like_site_are(tmp_path: Path) -> None:
    with ranks(tmp_path / "b", {}) as one, ranks(tmp_path / "t", {1: np.ones((4, 6), ml_dtypes.bfloat16)}) as two:
        found = {f.site: f for f in compare(one, two).findings}
    assert found["a:out"].verdict.value == "same"
    assert found["b:out"].test == "replicas"
