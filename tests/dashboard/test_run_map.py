"""Heat map of one run in the terminal: the content of cells, and the record that a cell opens."""

import asyncio
import math

import pytest
from dashboard_driver import Driver
from dashboard_runs import toy_run
from factories import RunFactory

from tapscope.dashboard.app import TapscopeApp
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.model.grid import layer_grid
from tapscope.dashboard.model.magnitudes import MEASURES, magnitudes_of
from tapscope.dashboard.model.run import magnitude_grid
from tapscope.dashboard.screens.run_map import RunMapScreen

BAD = "model.layers.2.self_attn.o_proj:out"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return toy_run(tmp_path_factory.mktemp("map") / "run")


def drive(run, steps, size=(100, 26)):
    async def main():
        app = TapscopeApp(lambda: RunSource.open(run))
        async with app.run_test(size=size) as pilot:
            driver = Driver(app, pilot)
            await driver.settle()
            await press(driver, "m")
            await steps(driver)

    asyncio.run(main())


async def press(driver, *keys):
    for key in keys:
        await driver.press(key)
        for _ in range(500):
            if driver.app.screen.settled:
                break
            await asyncio.sleep(0.01)
    await driver.pilot.pause()


def lines(driver):
    strips = driver.app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip).strip(" │") for strip in strips]


@pytest.mark.parametrize("measure", MEASURES)
def test_run_map_layers_are_the_maximum_of_their_sites(run, measure):
    source = RunSource.open(run)
    sites = magnitudes_of(source, None, 500, measure)
    layers = layer_grid(sites)
    for i, row in enumerate(layers.rows):
        for column in range(len(layers.columns)):
            values = [sites.cell(order, column).ratio for order in row.orders]
            known = [value for value in values if not math.isnan(value)]
            assert layers.cell(i, column).ratio == max(known)
    shown = next(row for row in sites.packed().rows if row.label == BAD)
    assert (shown.glyphs[1] == "%") is (measure in ("|max|", "rms"))
    assert sites.packed() == magnitude_grid(source, measure=measure)


@pytest.mark.parametrize("measure", MEASURES)
def test_run_map_largest_cell_is_that_of_a_search(run, measure):
    grid = magnitudes_of(RunSource.open(run), None, 500, measure)
    for rows in (range(len(grid.rows)), (3,), (len(grid.rows) - 1, 0)):
        for column in (None, *range(len(grid.columns))):
            at = [(r, c) for r in rows for c in (range(len(grid.columns)) if column is None else [column])]
            known = [place for place in at if grid.cell(*place).glyph != "·"]
            wanted = max(
                known, key=lambda place: (grid.cell(*place).glyph == "%", grid.cell(*place).ratio), default=None
            )
            assert grid.largest(rows, column) == wanted


def test_run_map_shows_layers_steps_and_values_that_are_not_finite(run):
    async def steps(driver):
        shown = lines(driver)
        assert "layers × steps · |max|" in shown[1]
        assert next(line for line in shown if "layer 2" in line).split() == ["%", "layer", "2", "9", "%", "9", "9"]
        assert next(line for line in shown if "lm_head" in line).split() == ["lm_head", *"∅∅∅∅"]
        assert f"{BAD} step 1: |max|" in shown[-2]
        assert "NaN or infinity" in shown[-2]

    drive(run, steps)


def test_run_map_opens_the_record_with_the_largest_measure(run):
    async def steps(driver):
        await press(driver, "enter")
        record = driver.app.screen.table.record
        assert (record.key.site, record.key.step) == (BAD, 1)
        await press(driver, "m", "full_stop", "full_stop", "full_stop")  # step 2 has only finite values
        await press(driver, *["j"] * 8, "enter")
        record = driver.app.screen.table.record
        assert (record.key.site, record.key.step) == ("lm_head:out", 2)

    drive(run, steps)


def test_run_map_measure_keeps_cursor_and_unfolded_layer(run):
    async def steps(driver):
        await press(driver, "j", "j", "right", "j")
        screen = driver.app.screen
        assert isinstance(screen, RunMapScreen)
        cursor, num_rows = screen.active.cursor, screen.active.num_rows
        for measure in (*MEASURES[1:], MEASURES[0]):
            await press(driver, "m")
            assert (screen.measure, screen.active.cursor, screen.active.num_rows) == (measure, cursor, num_rows)
            assert measure in lines(driver)[1]

    drive(run, steps)


def test_run_map_filters_sites_and_ranks(run):
    async def steps(driver):
        screen = driver.app.screen
        await press(driver, "slash", *"o_proj", "enter")
        assert {row.label for row in screen.active.layer_rows.rows} == {f"layer {i}" for i in range(4)}
        await press(driver, "greater_than_sign")
        assert screen.rank == 0
        assert "on rank 0" in lines(driver)[-2]
        await press(driver, "greater_than_sign")
        assert "NaN" not in lines(driver)[-2]  # rank 1 is finite
        await press(driver, "escape")
        assert len(screen.active.layer_rows.rows) == 5  # rank 1 has no norm and no lm_head
        await press(driver, "escape")
        assert not isinstance(driver.app.screen, RunMapScreen)

    drive(run, steps)


def test_run_map_joins_steps_that_do_not_fit_by_their_maximum(tmp_path):
    with RunFactory(tmp_path / "long") as factory:
        for step in range(300):
            factory.step()
            factory.put("layers.0.mlp:out", [math.nan if step == 171 else 1.0 + step])

    async def steps(driver):
        shown = lines(driver)
        assert "300 steps in" in shown[-2]
        assert next(line for line in shown if "layer 0" in line).count("%") == 2  # the row's glyph, and one cell
        await driver.press("colon", *"171", "enter", "plus", "plus", "plus")
        assert "layers × steps 152-189 of 300" in str(driver.app.screen.active.border_title)
        await driver.press("m")
        await driver.settle()
        assert "layers × steps 152-189 of 300" in str(driver.app.screen.active.border_title)

    drive(tmp_path / "long", steps, size=(80, 24))


def test_run_map_of_an_empty_run_says_so(tmp_path):
    with RunFactory(tmp_path / "empty") as factory:
        factory.step()

    async def steps(driver):
        assert "no records" in driver.screen.bar.said

    drive(tmp_path / "empty", steps)
