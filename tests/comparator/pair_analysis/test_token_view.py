"""Closeup: a finding row by row."""

import numpy as np
import pytest
from comparator_toy import Toy, weights

from tapscope.comparator import compare_open_runs
from tapscope.dashboard.finding_detail import strip_line, token_lines, value_lines

PROMPTS = {"0": list(range(3, 20)), "1": list(range(40, 51))}
SITE = "model.layers.2.mlp.down_proj:out"


@pytest.mark.parametrize("tp", [1, 2])
def test_token_view_damaged_token_stands_out(tmp_path, tp):
    def spoil(values):
        values = values.copy()
        values[20, 5] += 1.0  # the 4th token of request 1
        return values

    tables = weights()
    baseline = Toy(tables).write(tmp_path / "a", PROMPTS)
    target = Toy(tables, tp=tp, hooks={SITE: spoil}).write(tmp_path / "b", PROMPTS)
    comparison = compare_open_runs(baseline, target)
    finding = next(f for f in comparison.report.findings if f.site == SITE)
    seen = comparison.token_view(finding)
    assert seen is not None
    assert seen.labels[seen.worst] == "1:3"
    assert len(seen.errors) == len(seen.labels) == len(seen.steps) == finding.rows.num_compared
    assert int(seen.columns[seen.worst]) == 5
    window = seen.window
    assert window.target[5 - window.first] - window.baseline[5 - window.first] == pytest.approx(1.0, abs=1e-3)
    assert np.delete(seen.errors, seen.worst).max() < 1e-4


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_token_view_shows_a_non_finite_value(tmp_path, value):
    def spoil(values):
        values = values.copy()
        values[20, 41] = value
        return values

    tables = weights()
    baseline = Toy(tables).write(tmp_path / "a", PROMPTS)
    target = Toy(tables, hooks={"lm_head:out": spoil}).write(tmp_path / "b", PROMPTS)
    comparison = compare_open_runs(baseline, target)
    finding = next(f for f in comparison.report.findings if f.site == "lm_head:out")
    seen = comparison.token_view(finding)
    assert seen is not None
    assert (seen.labels[seen.worst], seen.errors[seen.worst], seen.columns[seen.worst]) == ("1:3", np.inf, -1)
    assert seen.window.column == 41
    np.testing.assert_equal(seen.window.target[41 - seen.window.first], value)
    assert strip_line(seen, None, 100).plain.count("%") == 1
    assert " %" in token_lines(seen, None, 100, 3)[1].plain
    assert str(value) in value_lines(seen, 60)[3].plain


def test_token_view_without_values_has_no_rows(tmp_path):
    tables = weights()
    baseline, target = (Toy(tables).write(tmp_path / name, PROMPTS) for name in "ab")
    comparison = compare_open_runs(baseline, target)
    assert all(comparison.token_view(f) is None for f in comparison.report.findings)
