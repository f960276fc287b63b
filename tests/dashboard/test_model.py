"""The view model: permalinks, grids, and numbers that are the comparator's own."""

import dataclasses
import json
import math
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from factories import RunFactory
from hypothesis import given
from hypothesis import strategies as st
from toy_pair import SITE, toy_pair

from tapscope.comparator import Verdict, compare, compare_open_runs
from tapscope.core.errors import ConfigError
from tapscope.core.formatting import printable
from tapscope.dashboard.model.diff import DiffView, HashedSteps, diff_view
from tapscope.dashboard.model.finding import finding_view, step_cells
from tapscope.dashboard.model.finding_grid import site_grid
from tapscope.dashboard.model.grid import CODES, Grid, GridColumn, GridRow, layer_grid
from tapscope.dashboard.model.permalink import Permalink, parse_permalink
from tapscope.dashboard.model.schema import escaped, json_schema, to_json
from tapscope.dashboard.model.tensor import pair_view
from tapscope.sources import open_run

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    root = toy_pair(tmp_path_factory.mktemp("model"))
    with open_run(root / "base") as baseline, open_run(root / "target") as target:
        yield (baseline, target), compare_open_runs(baseline, target)


@given(
    run=st.text(st.characters(codec="utf-8"), max_size=20),
    site=NAMES,
    step=st.integers(0, 10**6),
    index=st.none() | st.lists(st.integers(0, 10**6)).map(tuple),
)
def test_permalink_is_read_as_it_was_written(run, site, step, index):
    link = Permalink(run, site, step, 3, index)
    text = str(link)
    assert parse_permalink(text) == link
    assert printable(text) == text


@pytest.mark.parametrize("text", ["", "run", "run/site", "run/site@x.0", "run/site@1", "run/site@1.0[a]"])
def test_permalink_rejects_other_text(text):
    with pytest.raises(ConfigError, match="expected RUN/SITE@STEP.RANK"):
        parse_permalink(text)


def grid_of(ratios, codes):
    rows = tuple(GridRow(f"layers.{i}:out", f"layers.{i}:out", Verdict.DIFFERS, (i,)) for i in range(len(ratios)))
    return Grid(rows, tuple(GridColumn(i, i) for i in range(ratios.shape[1])), ratios, codes)


@given(st.data(), st.integers(1, 6), st.integers(1, 40), st.integers(1, 40))
def test_grid_bins_keep_the_maximum_of_every_bad_cell(data, num_rows, num_columns, wanted):
    size = num_rows * num_columns
    ratios = np.array(data.draw(st.lists(st.floats(0, 1e9), min_size=size, max_size=size)))
    codes = np.array(data.draw(st.lists(st.integers(0, 7), min_size=size, max_size=size)))
    ratios = np.where(codes == 0, np.nan, ratios).reshape(num_rows, num_columns)
    codes = codes.reshape(num_rows, num_columns).astype(np.uint8)
    grid = grid_of(ratios, codes)
    binned = grid.binned(wanted)
    assert len(binned.columns) <= wanted or len(binned.columns) == num_columns
    assert [binned.columns[0].first, binned.columns[-1].last] == [0, num_columns - 1]
    for c, column in enumerate(binned.columns):
        part = slice(column.first, column.last + 1)
        for r in range(num_rows):
            assert binned.codes[r, c] == codes[r, part].max()
            known = ratios[r, part][~np.isnan(ratios[r, part])]
            assert np.array_equal(binned.ratios[r, c], known.max() if len(known) else np.nan, equal_nan=True)


def test_site_grid_holds_the_ratio_of_every_step(compared):
    (baseline, target), comparison = compared
    grid = site_grid(comparison.report.findings, HashedSteps.of((baseline, target)))
    row = next(i for i, each in enumerate(grid.rows) if each.name == SITE)
    finding = comparison.report.findings[row]
    for result in finding.steps:
        cell = grid.cell(row, grid.column_of(result.step))
        assert cell.ratio == result.error / finding.row_floor
        assert cell.value == math.log10(cell.ratio)
        assert cell.glyph == str(min(math.ceil(cell.value), 9))
    assert grid.cell(0, 0).glyph == "="


def test_nan_in_one_step_is_bad_in_that_step_of_the_grid_and_nan_in_its_cells(tmp_path):
    values = np.ones((2, 4), np.float32)
    for name, steps in (("base", [values] * 3), ("target", [values, values * np.float32(np.nan), values * 2])):
        with RunFactory(tmp_path / name) as run:
            for each in steps:
                run.step()
                run.put("a:out", each)
    report = compare(tmp_path / "base", tmp_path / "target")
    (finding,) = report.findings
    assert finding.verdict is Verdict.NONFINITE
    cells = {step: step_cells(finding, step) for step in range(3)}
    assert [cells[step].verdict for step in range(3)] == [Verdict.SAME, Verdict.NONFINITE, Verdict.NONFINITE]
    assert (cells[1].max_abs.text, cells[1].rel_l2.text) == ("nan", "nan")
    assert (cells[2].max_abs.text, cells[2].rel_l2.text) == ("1.0e+00", "1.0e+00")
    assert site_grid([finding]).codes.tolist() == [[CODES[Verdict.NONFINITE]] * 2]
    view = finding_view(finding)
    assert (view.max_abs.value, view.max_abs.text, view.cosine.text) == (None, "nan", "nan")


def test_layer_grid_is_the_maximum_of_its_sites(compared):
    runs, comparison = compared
    sites = site_grid(comparison.report.findings, HashedSteps.of(runs))
    layers = layer_grid(sites)
    for i, row in enumerate(layers.rows):
        own = sites.codes[list(row.orders)]
        assert np.array_equal(layers.codes[i], own.max(axis=0))
    assert [row.label for row in layers.rows if row.is_cause] == ["layer 2"]


def test_diff_view_holds_the_numbers_of_the_report(compared):
    runs, comparison = compared
    view = diff_view(comparison.report, runs)
    lines = list(comparison.report.to_json())
    findings = {line["site"]: line for line in lines if line["type"] == "finding"}
    for each in view.findings:
        line = findings[each.site]
        assert (each.verdict, each.role) == (line["verdict"], line["role"])
        if line["metrics"] and each.max_abs.value is not None:
            assert each.max_abs.value == line["metrics"]["max_abs"]
            assert each.rel_l2.value == line["metrics"]["rel_l2"]
        if each.ratio.value is not None:
            assert each.ratio.value == line["ratio"]
    assert "\n".join(fact.text for fact in view.answer) in "\n".join(
        line[10:] for line in str(comparison.report).splitlines()
    )
    assert view.exit_code == comparison.report.exit_code


def test_diff_view_assigns_every_downstream_finding_to_one_cause(compared):
    runs, comparison = compared
    view = diff_view(comparison.report, runs)
    assigned = [order for cause in view.causes for order in cause.downstream]
    assert sorted(assigned) == [f.order for f in comparison.report.findings if f.role == "downstream"]
    assert view.causes[0].site == SITE


def test_diff_view_fits_its_json_schema(compared):
    runs, comparison = compared
    view = diff_view(comparison.report, runs)
    assert msgspec.json.decode(to_json(view), type=DiffView).causes == view.causes
    members = json_schema(DiffView)["$defs"]["DiffView"]["properties"]
    assert set(members) == set(json.loads(to_json(view)))


def test_pair_view_shows_the_values_around_the_worst_element(compared):
    _, comparison = compared
    finding = comparison.report.first_divergence.finding
    reader = comparison.reader(comparison.report.findings[finding.order])
    view = pair_view(finding.order, reader, 3, 8)
    worst = view.tile.rows[view.worst_row - view.tile.first_row]
    for base, target in zip(worst.baseline, worst.target, strict=True):
        assert float(target) == pytest.approx(1.5 * float(base), rel=1e-3)
    assert max(share for row in view.tile.rows for share in row.share) == 1.0


def test_pair_reader_tile_is_cut_at_the_ends(compared):
    _, comparison = compared
    finding = comparison.report.findings[comparison.report.first_divergence.finding.order]
    reader = comparison.reader(finding)
    tile = reader.tile(reader.num_rows - 2, 60, 10, 10)
    assert tile.baseline.shape == (2, 4)
    assert tile.num_columns == 64
    whole = reader.tile(0, 0, reader.num_rows, 64)
    assert np.array_equal(whole.baseline[-2:, 60:], tile.baseline)


@given(NAMES, NAMES)
def test_escaped_leaves_no_unsafe_character_in_any_view(site, note):
    from tapscope.dashboard.model.fact import Fact

    view = escaped((Fact(site, note), Fact(note, site)))
    assert all(printable(text) == text for fact in view for text in dataclasses.astuple(fact))


def test_view_model_imports_no_front_end():
    code = """
import sys, pkgutil, importlib, tapscope.dashboard.model as model
for each in pkgutil.iter_modules(model.__path__):
    importlib.import_module(f"{model.__name__}.{each.name}")
print(sorted({"textual", "fastapi", "jinja2", "torch", "uvicorn"} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
