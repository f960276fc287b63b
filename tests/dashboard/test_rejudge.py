"""Another tolerance and swapped sides: the report equals that of a new comparison, without measuring anything twice."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_pairs import MORE_DTYPES, pairs, write_pair

from tapscope.comparator import CompareOptions, compare_open_runs
from tapscope.comparator.pair_analysis import pair_analyzer
from tapscope.core.errors import ConfigError
from tapscope.core.formatting import json_line
from tapscope.dashboard import diff_source
from tapscope.dashboard.compare_settings import CompareSettings
from tapscope.dashboard.diff_source import DiffSource
from tapscope.sources import open_run

BOUNDS = st.sampled_from((0.0, 1e-40, 1e-6, 1e-3, 0.01, 0.25, 1.0, 100.0))
WAYS = st.builds(
    CompareSettings, swapped=st.booleans(), tolerance=st.sampled_from((None, "floor")) | st.tuples(BOUNDS, BOUNDS)
)


def lines(report):
    return [json_line(line) for line in report.to_json()]


@pytest.mark.hypothesis
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pair=pairs(MORE_DTYPES), ways=st.lists(WAYS, min_size=2, max_size=4))
def test_a_report_judged_again_is_that_of_a_new_comparison(pair, ways):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_pair(root, *pair)
        paths, first = (root / "base", root / "target"), CompareSettings()
        source = DiffSource.open(paths, CompareOptions(), None, first)
        for way in ways:
            source, fresh = source.again(way), DiffSource.open(paths, CompareOptions(), None, way)
            assert lines(source.report) == lines(fresh.report)
            assert np.array_equal(source.sites.ratios, fresh.sites.ratios, equal_nan=True)
            assert np.array_equal(source.sites.codes, fresh.sites.codes)


@pytest.fixture
def opened(tmp_path):
    rng = np.random.default_rng(0)
    base = rng.standard_normal((4, 6)).astype(np.float32)
    sites = {"model.a:out": [(base, base)], "model.b:out": [(base, base * np.float32(1 + 1e-6))]}
    sites |= {"model.embed:out": [(base, base)], "model.c:out": [(base, base * np.float32(1.5))]}
    write_pair(tmp_path, 4, sites)
    with open_run(tmp_path / "base") as baseline, open_run(tmp_path / "target") as target:
        yield baseline, target


def test_values_are_read_only_where_bounds_do_not_tell_what_a_tolerance_counts(opened, monkeypatch):
    comparison = compare_open_runs(*opened)
    counted = []
    count_over = pair_analyzer.PairAnalyzer.count_over

    def counting(analyzer, pairs):
        counted.append([pair.target.site for pair in pairs])
        return count_over(analyzer, pairs)

    monkeypatch.setattr(pair_analyzer.PairAnalyzer, "count_over", counting)
    judged = comparison.rejudged(CompareOptions(atol=1e-3))
    assert counted == [["model.c:out"]]
    assert [str(finding.verdict) for finding in judged.report.findings] == ["same", "close", "same", "differs"]
    again = judged.rejudged(CompareOptions())
    assert counted == [["model.c:out"]], "the floor counts nothing"
    assert lines(again.report) == lines(comparison.report)


def test_options_that_select_other_values_are_refused(opened):
    comparison = compare_open_runs(*opened)
    with pytest.raises(ConfigError, match="compare the runs again"):
        comparison.rejudged(CompareOptions(sites=("model.a:out",)))


def test_swapped_sides_do_not_open_the_runs_again(opened, monkeypatch):
    source = DiffSource(opened, compare_open_runs(*opened))
    monkeypatch.setattr(diff_source, "open_run", None)
    swapped = source.again(CompareSettings(swapped=True))
    assert swapped.shares_runs(source)
    assert swapped.report.baseline.name == source.report.target.name
