"""Chosen experts and keys are compared as sets, and the report states how many of k differ."""

import json
from pathlib import Path

import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory

from tapscope.cli import main
from tapscope.comparator import Finding, Report, Verdict
from tapscope.core.observe import RowSpan

EXPERTS, KEYS = "layers.0.mlp.gate:out[2]", "layers.0.self_attn.indexer:tap[topk_indices]"
CHOSEN = np.array([[0, 3, 5], [1, 2, 6], [7, 0, 2], [4, 5, 6]])


def _write(path: Path, site: str, chosen: np.ndarray) -> Path:
    """Write four rows of one request, in two steps."""
    with RunFactory(path) as run:
        for step in range(2):
            run.step(grid=(2,), rows=[RowSpan("a", 2 * step, 2, 0, 0)], token_ids=[5 + step, 7 + step])
            run.put("layers.0.input_layernorm:out", np.ones((2, 4), np.float32), dims="t h")
            run.put("layers.0.mlp.experts:in[0]", np.ones((2, 4), np.float32), dims="t h")
            run.put(site, chosen[2 * step : 2 * step + 2], dims="t k")
    return path


def _compare(tmp_path: Path, site: str, baseline: np.ndarray, target: np.ndarray) -> tuple[Report, Finding]:
    report = diff(_write(tmp_path / "b", site, baseline), _write(tmp_path / "t", site, target))
    return report, next(finding for finding in report.findings if finding.site == site)


@pytest.mark.parametrize(("site", "what"), [(EXPERTS, "experts"), (KEYS, "keys")])
def test_choice_differences_count_the_choices_that_only_one_run_has(tmp_path: Path, site: str, what: str) -> None:
    other = CHOSEN.copy()
    other[1] = [1, 2, 7]  # one other
    other[2] = [6, 5, 7]  # two others, and 7 elsewhere
    other[3] = [6, 5, 4]  # the same in another order
    report, found = _compare(tmp_path, site, CHOSEN, other)
    assert found.verdict is Verdict.DIFFERS
    assert found.choices is not None
    assert (found.choices.k, found.choices.num_rows) == (3, 4)
    assert (found.choices.num_rows_different, found.choices.num_different, found.choices.max_different) == (2, 3, 2)
    said = f"2 of 3 {what} differ in the worst row; other {what} in 2 of 4 rows, 3 choices in all"
    assert said in found.notes
    assert said in str(report)


def test_choice_differences_are_in_the_json_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = CHOSEN + (CHOSEN == 7)
    runs = [_write(tmp_path / name, EXPERTS, chosen) for name, chosen in (("b", CHOSEN), ("t", other))]
    assert main(["diff", "--json", *map(str, runs)]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    by_site = {line["site"]: line["choices"] for line in lines if line["type"] == "finding"}
    one = {"k": 3, "num_rows": 4, "num_rows_different": 1, "num_different": 1, "max_different": 1}
    assert by_site.pop(EXPERTS) == one
    assert set(by_site.values()) == {None}


def test_chosen_keys_in_another_order_are_the_same(tmp_path: Path) -> None:
    report, found = _compare(tmp_path, KEYS, CHOSEN, CHOSEN[:, ::-1])
    assert report.exit_code == 0, str(report)
    assert found.verdict is Verdict.CLOSE
    assert found.choices is not None
    assert found.choices.num_different == 0
    assert "the same keys in another order" in found.notes


def test_choice_differences_count_missing_keys_and_skip_other_integers(tmp_path: Path) -> None:
    early = np.array([[0, -1, -1], [0, 1, -1], [0, 1, 2], [1, 2, 3]])
    late = np.array([[0, -1, -1], [0, -1, -1], [0, 1, 2], [0, 2, 3]])
    _, found = _compare(tmp_path, KEYS, early, late)
    assert found.choices is not None
    assert (found.choices.num_rows_different, found.choices.num_different) == (2, 2)
    _, counts = _compare(tmp_path / "counts", EXPERTS, np.ones((4, 3), np.int64), np.full((4, 3), 2))
    assert counts.choices is None  # rows with a repeated number are not choices
