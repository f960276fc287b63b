"""All values of a tensor and of a pair: reading by the view model, and every key of the screen."""

import asyncio
import gc
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from comparator_toy import Toy, weights
from dashboard_driver import Driver
from dashboard_runs import toy_run
from factories import RunFactory
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_pair import SITE, scaled, toy_pair

from tapscope.comparator import CompareOptions
from tapscope.core.errors import ConfigError, RunCorruptError
from tapscope.core.observe import RowSpan
from tapscope.dashboard.app import TapscopeApp
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.diff_source import DiffSource
from tapscope.dashboard.keymap import CELL_KEYS
from tapscope.dashboard.model.number import Number
from tapscope.dashboard.model.overview import BINS, EqualBins, SharedBin, overview
from tapscope.dashboard.model.permalink import parse_permalink
from tapscope.dashboard.model.record_values import RecordValueTable
from tapscope.dashboard.model.tile import cell, tile
from tapscope.dashboard.model.token_strip import TokenRow, TokenStrip, token_strip
from tapscope.dashboard.model.value_map import value_map
from tapscope.dashboard.model.value_search import find, largest
from tapscope.dashboard.model.value_table import parse_index
from tapscope.dashboard.overview_text import LABEL, histogram_lines, metrics_text, token_lines
from tapscope.dashboard.screens.help import HelpScreen
from tapscope.dashboard.screens.keymap_screen import TENSOR
from tapscope.dashboard.screens.tensor import TensorScreen
from tapscope.dashboard.widgets import value_grid
from tapscope.sources import open_run

pytestmark = pytest.mark.usefixtures("no_rest")


def table_of(tmp_path, values, **options):
    with RunFactory(tmp_path / "run") as run:
        run.step()
        run.put("a:out", values, **options)
    source = RunSource.open(tmp_path / "run")
    return source.table(source.run.records[0])


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return toy_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def pair_table(pair):
    source = DiffSource.open((pair / "base", pair / "target"), CompareOptions())
    return source.table(next(f for f in source.report.findings if f.site == SITE))


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (2, 1, 3, 4, 2), (2, 3, 1), (4096,), (2, 2, 1, 1)]
)
def test_record_table_places_every_index_of_any_rank(tmp_path, shape):
    values = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    table = table_of(tmp_path, values)
    assert table.num_rows * table.num_columns == values.size
    for flat in range(0, values.size, max(values.size // 7, 1)):
        index = tuple(int(i) for i in np.unravel_index(flat, shape))
        row, column = table.place(index) if len(shape) != 0 else (0, 0)
        assert table.index(row, column) == index
        assert cell(table, row, column).target == f"{float(flat):.5g}"


@pytest.mark.parametrize("shape", [(2500,), (1, 600_001), (3, 300_001)])
def test_very_wide_rows_are_folded_and_a_tile_reads_a_part_of_them(tmp_path, monkeypatch, shape):
    values = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    values[(-1,) * len(shape)] = -1e9
    table = table_of(tmp_path, values)
    assert table.num_columns == 1024
    assert table.num_rows == shape[0] * 293 if len(shape) == 2 and shape[0] == 3 else table.num_rows > 1
    read, chunk = [], RecordValueTable.chunk
    monkeypatch.setattr(RecordValueTable, "chunk", lambda *words: read.append(chunk(*words)[0].size) or chunk(*words))
    for index in (tuple(n - 1 for n in shape), tuple(n // 2 for n in shape), (0,) * len(shape)):
        row, column = table.place(index)
        assert table.index(row, column) == index
        assert cell(table, row, column).target == f"{values[index]:.5g}"
        shown = tile(table, row, column, 2, 2)
        assert shown.target[0][0] == f"{values[index]:.5g}"
        assert {len(line) for line in (*shown.target, *shown.shares)} == {len(shown.target[0])}
    assert max(read) <= 2048
    last = table.place(tuple(n - 1 for n in shape))
    assert largest(table) == last
    assert find(table, 0, 0, 1, 5e8) == last
    assert find(table, *last, -1, values.size - 3) == table.place(np.unravel_index(values.size - 2, shape))
    assert find(table, 0, 0) is None
    beyond = cell(table, last[0], 1023)  # the last line is shorter
    assert (beyond.index, beyond.target) == ("", "")
    assert "[" not in beyond.link
    found = overview(table)
    assert sum(each.target for each in found.values) == values.size
    assert found.num_nonfinite == 0
    assert len(token_strip(table, "error").rows) == min(table.num_rows, 500)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_record_table_of_an_empty_tensor_shows_nothing(tmp_path, shape):
    table = table_of(tmp_path, np.zeros(shape, np.float32))
    assert tile(table, 0, 0, 8, 8).target == ()
    assert find(table, 0, 0) is None
    assert overview(table).values == ()


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool", "bfloat16", "float8_e4m3fn", "complex64", "float64"])
def test_tile_shows_values_of_every_dtype(tmp_path, dtype):
    kind = getattr(ml_dtypes, dtype, None) or np.dtype(dtype)
    table = table_of(tmp_path, np.ones((3, 4)).astype(kind))
    expected = {"bool": "True", "complex64": "1+0j"}.get(dtype, "1")
    assert tile(table, 1, 1, 1, 2).target == ((expected, expected),)
    assert overview(table).max_abs.value == 1.0


def test_tile_shows_large_integers_exactly(tmp_path):
    table = table_of(tmp_path, np.array([[2**62 + 1, -3]], np.int64))
    assert tile(table, 0, 0, 1, 2).target == ((str(2**62 + 1), "-3"),)


def test_find_visits_values_that_are_not_finite_both_ways(tmp_path):
    values = np.zeros((600, 700), np.float32)  # several blocks
    for place in ((0, 3), (299, 699), (599, 0)):
        values[place] = np.nan
    table = table_of(tmp_path, values)
    assert find(table, 0, 0) == (0, 3)
    assert find(table, 0, 3) == (299, 699)
    assert find(table, 299, 699) == (599, 0)
    assert find(table, 599, 0) is None
    assert find(table, 599, 0, -1) == (299, 699)
    assert find(table, 299, 699, -1) == (0, 3)
    assert find(table, 0, 3, -1) is None


def test_find_compares_magnitudes_with_a_number(tmp_path):
    values = np.zeros((4, 4), np.float32)
    values[1, 2], values[3, 1] = -5.0, 2.0
    table = table_of(tmp_path, values)
    assert find(table, 0, 0, 1, 1.0) == (1, 2)
    assert find(table, 1, 2, 1, 1.0) == (3, 1)
    assert find(table, 1, 2, 1, 3.0) is None
    assert largest(table) == (1, 2)


def test_overview_of_one_run_counts_every_finite_value_once(tmp_path):
    rng = np.random.default_rng(0)
    values = rng.standard_normal((50, 30)).astype(np.float32)
    values[7, 9], values[8, 1] = np.inf, 0.0
    found = overview(table_of(tmp_path, values))
    assert sum(each.target for each in found.values) == 1499
    assert sum(each.target for each in found.magnitudes) == 1498
    assert found.num_nonfinite == 1
    assert found.channels[9].share is None
    assert found.rows[7].share is None
    assert (len(found.channels), len(found.rows)) == (30, 50)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=40), st.integers(1, 7), st.randoms()
)
def test_equal_bins_count_every_value_once_in_any_order(numbers, num_chunks, order):
    values = np.array(numbers)
    parts, whole = EqualBins(), EqualBins()
    for chunk in np.array_split(np.array(order.sample(numbers, len(numbers))), num_chunks):
        parts.add(1, chunk)
    whole.add(1, values)
    bins = list(whole.bins())
    assert list(parts.bins()) == bins
    assert len(bins) <= BINS
    assert sum(count for *_, count in bins) == len(values)
    assert bins[0][0] <= values.min() <= values.max() <= bins[-1][1]
    counts = [int(((values >= low) & (values < high)).sum()) for low, high, *_ in bins[:-1]]
    assert counts == [count for *_, count in bins[:-1]]


def test_overview_of_a_pair_agrees_with_the_report(pair):
    source = DiffSource.open((pair / "base", pair / "target"), CompareOptions())
    finding = next(f for f in source.report.findings if f.site == SITE)
    found = overview(source.table(finding))
    assert found.max_abs.value == pytest.approx(finding.metrics.max_abs, rel=1e-6)
    assert found.what == "max |Δ|"
    for bins in (found.values, found.magnitudes):
        assert sum(each.baseline for each in bins) > 0
    assert sum(each.difference for each in found.magnitudes) > 0
    assert found.ulp_max.value > 1


def test_pair_tile_has_both_sides_and_their_difference(pair_table):
    row, column = largest(pair_table)
    shown = tile(pair_table, row, column, 1, 1)
    a, b = float(shown.baseline[0][0]), float(shown.target[0][0])
    assert b == pytest.approx(1.5 * a, rel=1e-3)
    assert float(shown.difference[0][0]) == pytest.approx(b - a, rel=0.05)
    at = cell(pair_table, row, column)
    assert at.link.startswith(f"target/{SITE}@")
    run = open_run(Path(pair_table._reader._ready.right[0].run.path))
    record = next(r for r in run.records if r.key.site == SITE and r.key.step == pair_table.step(row))
    value = run.array(record)[parse_index(at.index)]
    assert f"{float(value):.5g}" == at.target


def pair_of(tmp_path, steps, change):
    """Create the table of a site from one array per step; ``change`` modifies the arrays of the target."""
    for name in ("base", "target"):
        with RunFactory(tmp_path / name) as run:
            for values in steps:
                run.step()
                run.put("a:out", change(values) if name == "target" else values)
    source = DiffSource.open((tmp_path / "base", tmp_path / "target"), CompareOptions())
    return source.table(source.report.findings[0])


def test_pair_table_folds_a_long_vector_and_reads_parts_of_it(tmp_path):
    values = np.linspace(1, 2, 300_000, dtype=np.float32)
    table = pair_of(tmp_path, [values], lambda x: np.where(np.arange(300_000) == 2400, -x, x))
    assert (table.num_rows, table.num_columns) == (293, 1024)
    assert largest(table) == (2, 352)
    assert table.cell_of(0, 2400) == (2, 352)
    at = cell(table, 2, 352)
    assert (at.index, at.target) == ("[2400]", f"{-values[2400]:.5g}")
    assert tile(table, 2, 350, 1, 1).baseline == ((f"{values[2398]:.5g}",),)
    assert overview(table).equal.value == pytest.approx(100 * 299_999 / 300_000)
    assert cell(table, 292, 1023).target == ""


def test_overview_of_a_pair_gives_nan_where_one_run_alone_is_not_finite(tmp_path):
    values = np.ones((2, 4), np.float32)
    found = overview(pair_of(tmp_path, [values], lambda x: np.where(np.arange(4) == 2, np.nan, x)))
    assert [each.text for each in (found.max_abs, found.rel_l2, found.cosine)] == ["nan"] * 3
    assert [each.value for each in (found.max_abs, found.rel_l2, found.cosine)] == [None] * 3
    assert (found.num_nonfinite, found.equal.text) == (2, "75.0 %")
    assert "max |Δ| nan · rel l2 nan · cosine nan" in metrics_text(found, is_pair=True)


def test_pair_table_counts_no_filler_of_steps_with_narrower_rows(tmp_path):
    steps = [np.ones((2, 4), np.float32), np.ones((2, 6), np.float32)]
    table = pair_of(tmp_path, steps, lambda x: x * 3)
    assert (table.num_rows, table.num_columns) == (4, 6)
    assert find(table, 0, 0) is None
    found = overview(table)
    assert (found.num_nonfinite, found.equal.value) == (0, 0.0)
    assert tile(table, 0, 0, 4, 6).target == (("3",) * 4 + ("",) * 2,) * 2 + (("3",) * 6,) * 2
    assert (cell(table, 0, 5).target, cell(table, 3, 5).target) == ("", "3")


def test_pair_table_index_counts_the_parts_of_a_complex_number_once(tmp_path):
    values = (np.arange(12).reshape(3, 4) + 1j).astype(np.complex64)
    table = pair_of(tmp_path, [values], lambda x: x * 2)
    assert table.num_columns == 8
    assert [table.index(1, column) for column in (0, 1, 5, 7)] == [(1, 0), (1, 0), (1, 2), (1, 3)]


def test_pair_table_links_to_the_shard_that_holds_the_value(tmp_path):
    tables, prompts, site = weights(), {"0": list(range(3, 20))}, "model.layers.2.mlp.gate_proj:out"
    Toy(tables, tp=2).write(tmp_path / "base", prompts).close()
    Toy(tables, tp=2, hooks={site: scaled}).write(tmp_path / "target", prompts).close()
    source = DiffSource.open((tmp_path / "base", tmp_path / "target"), CompareOptions())
    table = source.table(next(f for f in source.report.findings if f.site == site))
    run = open_run(tmp_path / "target")
    ranks = set()
    for column in (0, table.num_columns // 2 - 1, table.num_columns // 2, table.num_columns - 1):
        at = cell(table, 0, column)
        link = parse_permalink(at.link)
        record = next(r for r in run.records if r.key[:3] == (site, link.step, link.rank))
        assert f"{float(run.array(record)[link.index]):.5g}" == at.target
        assert at.index == f"[0,{column}]"
        ranks.add(link.rank)
    assert ranks == {0, 1}


def test_token_strip_is_in_order_of_positions_or_of_errors(pair_table):
    by_position = token_strip(pair_table)
    places = [(each.label.partition(" ")[0].split(":")) for each in by_position.rows]
    assert [(request, int(position)) for request, position in places] == sorted(
        (request, int(position)) for request, position in places
    )
    assert "#" in by_position.rows[0].label  # the token id
    by_error = token_strip(pair_table, "error")
    errors = [each.error.value for each in by_error.rows]
    assert errors == sorted(errors, reverse=True)
    assert sorted(each.row for each in by_error.rows) == sorted(each.row for each in by_position.rows)
    assert len(token_strip(pair_table, "error", 2, 3).rows) == 3


@pytest.mark.parametrize("text", ["", "a", "1,", "-1,2", "[1", "1.5,2", "²"])
def test_parse_index_refuses_what_is_no_index(text):
    if text == "[1":
        assert parse_index(text) == (1,)
        return
    with pytest.raises(ConfigError, match="invalid index"):
        parse_index(text)


def test_place_names_the_size_of_the_table(tmp_path):
    table = table_of(tmp_path, np.zeros((3, 4), np.float32))
    with pytest.raises(ConfigError, match=r"outside the shape \[3, 4\]"):
        table.place((3, 0))
    with pytest.raises(ConfigError, match="expected row, column of 3 × 4"):
        table.place((1, 2, 3))


# --- text of the overview --------------------------------------------------------------------------


def bins_of(counts):
    return tuple(SharedBin(float(i), i + 1.0, 0, num, 0, "") for i, num in enumerate(counts))


def test_histogram_lines_add_up_bins_that_do_not_fit():
    counts = [0] * 39 + [7]
    for width in (111, 51, 31):
        line, axis = histogram_lines(bins_of(counts), width, ("target",))
        blocks = line.plain[LABEL:]
        assert 0 < len(blocks) <= width - LABEL
        assert blocks[0] == "·"
        assert blocks[-1] == "█"
        assert axis.plain.endswith("4.00e+01")


def test_token_lines_join_rows_by_their_worst_and_count_those_left_out():
    shares = [0.0] * 99 + [1.0]
    number = Number(0.0, "0")
    rows = tuple(TokenRow(i, f"0:{i}", 0, number, number, share) for i, share in enumerate(shares))
    head, line, *_ = token_lines(TokenStrip("position", 0, 4096, rows), 42, "o")
    assert head.plain == "by position (o: by error), the first 100 of 4,096 rows"
    assert (len(line.plain), line.plain[-1]) == (40, "█")
    assert token_lines(TokenStrip("error", 0, 100, rows), 42, "o")[0].plain == "by error (o: by position)"


@settings(deadline=None, max_examples=15)
@given(
    st.tuples(st.integers(1, 600), st.integers(1, 700)),
    st.integers(1, 40),
    st.integers(1, 40),
    st.lists(st.sampled_from([np.nan, np.inf, 1e30, -5.0]), max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_value_map_cells_are_the_maximum_of_their_rectangle(tmp_path_factory, shape, rows, columns, odd, seed):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape).astype(np.float32)
    values.reshape(-1)[rng.integers(0, values.size, len(odd))] = odd
    table = table_of(tmp_path_factory.mktemp("map"), values)
    for found in ((whole := value_map(table)), whole.binned(rows, columns)):
        assert found.rows[0][0] == found.columns[0][0] == 0
        assert (found.rows[-1][1], found.columns[-1][1]) == (table.num_rows, table.num_columns)
        all_values = values.reshape(table.num_rows, table.num_columns)
        for i in rng.choice(len(found.rows), min(6, len(found.rows))):
            for j in rng.choice(len(found.columns), min(6, len(found.columns))):
                part = np.abs(all_values[slice(*found.rows[i]), slice(*found.columns[j])])
                assert found.bad[i, j] == (~np.isfinite(part)).any()
                assert found.peaks[i, j] == part[np.isfinite(part)].max(initial=0.0)
        assert sum(line.count("%") for line in found.glyphs()) == found.bad.sum()
        largest_cell = largest(table, found.rows[0], found.columns[0])
        assert found.rows[0][0] <= largest_cell[0] < found.rows[0][1]
        assert found.columns[0][0] <= largest_cell[1] < found.columns[0][1]


def test_value_map_of_a_pair_shows_differences(pair_table):
    found = value_map(pair_table)
    errors, peaks = pair_table.row_errors
    np.testing.assert_array_equal(found.peaks.max(1), peaks)
    assert [set(line) == {"="} for line in found.glyphs()] == (errors == 0).tolist()


# --- the screen ------------------------------------------------------------------------------------


class Cells(Driver):
    @property
    def screen(self):
        return next(each for each in reversed(self.app.screen_stack) if hasattr(each, "settled"))

    @property
    def grid(self):
        return self.screen.grid

    @property
    def place(self):
        return self.grid.row, self.grid.column

    def text(self, id):
        return self.app.screen.query_one(f"#{id}").content.plain


def drive(app, steps, size=(120, 36)):
    async def go():
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            driver = Cells(app, pilot)
            await driver.settle()
            await driver.press("c")
            await driver.settle()
            await steps(driver)

    asyncio.run(go())


def open_pair(pair):
    paths = pair / "base", pair / "target"
    return TapscopeApp(open_diff=(lambda way, progress: DiffSource.open(paths, CompareOptions()), "base → target"))


def test_tensor_screen_of_a_pair_opens_at_the_largest_error_also_of_one_step(pair):
    async def steps(d):
        screen, source = d.app.screen_stack[1], d.app.screen_stack[1].source
        finding = screen.table.finding
        assert d.place == source.worst_value(finding)
        assert d.screen.values.link(*d.place) == source.link(finding)
        worst = d.screen.values.step(d.place[0])
        other = next(step for step in source.steps if step != worst)
        await d.press("escape", "colon", *str(other), "enter", "c")
        await d.settle()
        assert d.screen.values.step(d.place[0]) == other

    drive(open_pair(pair), steps)


def test_value_under_the_cursor_fits_the_line(pair):
    async def steps(d):
        wide = d.text("value")
        assert "baseline" in wide
        await d.pilot.resize_terminal(80, 24)
        await d.until(lambda: "baseline" not in d.text("value"))
        narrow = d.text("value")
        assert " → " in narrow
        assert narrow.split(" · ")[-2:] == wide.split(" · ")[-2:]  # the difference and its ULPs

    drive(open_pair(pair), steps)


def test_tensor_screen_moves_its_cursor_over_all_rows_and_columns(tmp_path):
    run = toy_run(tmp_path / "run")

    async def steps(d):
        assert isinstance(d.screen, TensorScreen)
        for keys, place in (
            (["j", "down", "l", "right"], (2, 2)),
            (["k", "h"], (1, 1)),
            (["up", "left"], (0, 0)),
            (["G"], (6, 0)),
            (["end"], (6, 63)),
            (["g"], (0, 63)),
            (["home"], (0, 0)),
            (["pagedown"], (6, 0)),
            (["pageup"], (0, 0)),
            (["h", "k"], (0, 0)),
        ):
            await d.press(*keys)
            assert d.place == place, keys
        await d.press("colon", *"[3,17]", "enter")
        assert d.place == (3, 17)
        assert "[3,17] · 0:3 #3" in d.text("value")
        await d.press("colon", *"9,9", "enter")
        assert "outside the shape" in d.screen.query_one("KeyBar").said
        await d.press("escape", "escape")
        assert not isinstance(d.screen, TensorScreen)

    drive(TapscopeApp(lambda: RunSource.open(run)), steps)


def test_tensor_screen_searches_values(pair):
    async def steps(d):
        await d.press("f")
        first = d.place
        assert first == largest(d.screen.values)
        await d.press("n")
        assert "All values after this one are finite" in d.screen.query_one("KeyBar").said
        await d.press("N")
        assert "All values before this one are finite" in d.screen.query_one("KeyBar").said
        await d.press("g", "home", "x", *"1e-3", "enter")
        await d.settle()
        place = d.place
        assert place == find(d.screen.values, 0, 0, 1, 1e-3)
        await d.press("b")
        assert d.place > place
        await d.press("B")
        assert d.place == place
        await d.press("x", *"abc", "enter")
        assert "invalid number" in d.screen.query_one("KeyBar").said

    drive(open_pair(pair), steps)


def test_tensor_screen_shows_every_view_and_side(pair):
    async def steps(d):
        assert "cosine" in d.text("summary")
        assert "baseline" in d.text("summary")
        for word in ("difference", "max |Δ|", "largest:", "by position"):
            await d.press("v")
            assert word in d.text("summary").replace("Δ  ", "difference"), word
        await d.press("o")
        assert "by error" in d.text("summary")
        assert "difference" in d.text("status")
        for side in ("target", "baseline", "difference"):
            await d.press("s")
            assert d.grid.side == side
        await d.press("y")
        assert "copied: target/" in d.screen.query_one("KeyBar").said
        await d.press("question_mark")
        assert isinstance(d.app.screen, HelpScreen)

    drive(open_pair(pair), steps)


def test_tensor_screen_of_one_run_shows_no_differences(tmp_path):
    async def steps(d):
        await d.press("v")
        assert "magnitudes" in d.text("summary")
        assert "target" in d.text("summary")
        assert "Δ" not in d.text("summary")

    run = toy_run(tmp_path / "run")
    drive(TapscopeApp(lambda: RunSource.open(run)), steps)


def test_tensor_screen_shows_the_keys_of_the_user(tmp_path):
    keys = ["largest=F2", "side=f4", "view=w"]

    async def steps(d):
        d.app.simulate_key("F2")
        assert "F2 largest" in d.screen.query_one("KeyBar").content.plain
        assert "(w: more)" in d.text("summary")
        await d.press("question_mark")
        assert "F2" in d.app.screen.query_one("#help-text").content.plain

    run = toy_run(tmp_path / "run")
    drive(TapscopeApp(lambda: RunSource.open(run), keys=keys), steps, size=(160, 36))


def test_tensor_screen_refuses_a_key_for_two_of_its_actions():
    with pytest.raises(ConfigError, match="f would start both largest and view"):
        TapscopeApp(keys=["view=f"])


def test_tensor_screen_says_that_values_have_gone(tmp_path, monkeypatch):
    run = toy_run(tmp_path / "run")

    async def steps(d):
        def gone(*words):
            raise RunCorruptError("the file is gone\x1b[31m")

        monkeypatch.setattr(value_grid, "tile", gone)
        d.grid._tile = None
        await d.press("j")
        shown = d.grid.text
        assert "cannot be read: the file is gone" in shown
        assert "\x1b" not in shown
        assert d.app.is_running

    drive(TapscopeApp(lambda: RunSource.open(run)), steps)


def test_tensor_screen_says_why_there_are_no_values(tmp_path):
    with RunFactory(tmp_path / "run") as run:
        run.step()
        run.put("a:out", np.zeros((2, 2), np.float32), keep="stats")

    async def steps(d):
        assert "No tensor with recorded values" in d.screen.query_one("KeyBar").said

    drive(TapscopeApp(lambda: RunSource.open(tmp_path / "run")), steps)


def test_tensor_screen_binds_no_key_twice_and_existing_actions_only():
    keys = [key for spec in CELL_KEYS for key in spec.keys]
    assert len(keys) == len(set(keys))
    for spec in CELL_KEYS:
        name = spec.action.partition("(")[0]
        assert name == "app.command_palette" or hasattr(TensorScreen, f"action_{name}"), spec.id


@pytest.mark.parametrize("size", [(20, 6), (60, 20), (300, 100)])
def test_tensor_screen_fits_every_size(pair, size):
    async def steps(d):
        await d.press("G", "end", "v")
        assert d.place == (d.screen.values.num_rows - 1, d.screen.values.num_columns - 1)

    drive(open_pair(pair), steps, size)


def test_tensor_screen_shows_the_whole_tensor_and_opens_a_cell(tmp_path):
    values = np.ones((300, 500), np.float32)
    values[33, 14], values[290, 490] = 7, np.nan
    with RunFactory(tmp_path / "run") as run:
        run.step()
        run.put("a:out", values)

    async def steps(d):
        assert d.place == (290, 490)  # the only non-finite value
        await d.press("g", "home", "m")
        assert d.screen.map.display
        lines = d.screen.map.render().plain.splitlines()
        assert " × 101 cells of 300 × 500 values" in lines[0]
        assert sum(line.count("%") for line in lines) == 1
        assert sum(line.count("9") for line in lines[1:] if "9" in line[17:]) >= 1
        marked = next(i for i, line in enumerate(lines[1:]) if "9" in line[17:])
        await d.press(*["j"] * marked, *["l"] * lines[1 + marked][17:].index("9"))
        assert "max |x| 7.0e+00" in d.text("value")
        await d.press("enter")
        assert not d.screen.map.display
        assert d.place == (33, 14)
        await d.press("m", "escape")
        assert isinstance(d.screen, TensorScreen)
        assert not d.screen.map.display
        await d.press("m", "G", "end")
        assert "columns" in d.text("value")
        await d.pilot.resize_terminal(60, 20)
        await d.until(lambda: " × 41 cells of" in d.screen.map.render().plain)

    drive(TapscopeApp(lambda: RunSource.open(tmp_path / "run")), steps)


def test_tensor_screen_of_another_tensor_is_as_a_new_one(pair):
    seen, screens = [], set()

    def looks(d):
        said = [d.text(id) for id in ("status", "summary", "value", "keys")]
        return said, d.place, d.grid.text, d.screen.map.render().plain, d.screen.link, d.screen.focused.id

    async def new(d):
        await d.press("escape")
        d.app.uninstall_screen(TENSOR)
        await d.press("g", "c")
        await d.settle()
        seen.append(looks(d))

    async def used(d):
        screens.add(d.screen)
        await d.press("s", "v", "l", "j", "x", *"1e-3", "enter", "m", "l")
        await d.settle()
        before = looks(d)
        await d.press("escape", "escape", "g", "c")
        await d.settle()
        screens.add(d.screen)
        assert d.screen.settled
        assert looks(d) != before
        seen.append(looks(d))

    drive(open_pair(pair), new)
    drive(open_pair(pair), used)
    assert seen[0] == seen[1]
    assert len(screens) == 1


def test_tensor_screen_that_is_closed_holds_no_values(tmp_path):
    path = toy_run(tmp_path / "run")

    async def steps(d):
        await d.press("s", "m")
        await d.settle()
        values = weakref.ref(d.screen.values)
        await d.press("escape", "escape")
        await d.settle()
        gc.collect()
        assert values() is None
        await d.press("c")
        await d.settle()
        assert d.screen.values.num_rows

    drive(TapscopeApp(lambda: RunSource.open(path)), steps)


def test_tensor_screen_labels_rows_with_the_text_of_their_tokens(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"zero": 0, "one\x1b": 1, "two": 2}, unk_token="zero"))
    (tmp_path / "model").mkdir()
    made.save(str(tmp_path / "model" / "tokenizer.json"))
    for name, scale in (("base", 1), ("target", 2)):
        with RunFactory(tmp_path / name, model=str(tmp_path / "model")) as run:
            run.step(grid=(3,), rows=[RowSpan("0", 0, 3, 0, 0)], token_ids=[2, 1, 99])
            run.put("a:out", scale * np.ones((3, 4), np.float32), dims="t h")
    wanted = ["0:0 #2 'two'", "0:1 #1 'one\\x1b'", "0:2 #99"]
    source = RunSource.open(tmp_path / "base")
    table = source.table(source.run.records[0])
    assert [table.label(row) for row in range(3)] == wanted
    diff = DiffSource.open((tmp_path / "base", tmp_path / "target"), CompareOptions())
    table = diff.table(diff.report.findings[0])
    assert [table.label(row) for row in range(3)] == wanted
    assert [row.label for row in token_strip(table).rows] == wanted


@pytest.mark.parametrize(("width", "lists"), [(80, False), (120, True)])
def test_tensor_title_lists_the_sides_where_the_name_has_room(pair, width, lists):
    async def steps(d):
        title = d.text("status")
        assert len(title) <= width
        assert ("(s: difference, target, baseline)" in title) is lists
        assert "× " in title
        assert "difference" in title

    drive(open_pair(pair), steps, size=(width, 24))
