"""A site, a finding and a run's metrics over all steps."""

import asyncio

import numpy as np
import pytest
from dashboard_driver import Driver
from dashboard_runs import toy_run
from factories import RunFactory

from tapscope.dashboard.app import TapscopeApp
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.live_run import LiveRun
from tapscope.dashboard.model.live import live_series
from tapscope.dashboard.model.series import Series, SeriesPoint, metric_series, series_of, site_series, sparkline


@pytest.fixture
def source(tmp_path):
    with RunFactory(tmp_path / "run", mesh={"tp": 2}) as run:
        for step in range(5):
            run.step()
            values = np.full((2, 2), float(step), np.float32)
            if step == 3:
                values[0, 0] = np.nan
            run.put("a:out", {0: values, 1: values * 2})
    return RunSource.open(tmp_path / "run")


def test_site_series_has_every_step_of_every_rank(source):
    found = site_series(source, "a:out")
    assert [(each.name, each.rank) for each in found.series] == [("rms", 0), ("rms", 1), ("|max|", 0), ("|max|", 1)]
    top = found.series[3]
    assert [(each.step, each.value) for each in top.points] == [(0, 0.0), (1, 2.0), (2, 4.0), (3, None), (4, 8.0)]
    assert top.text == "0 to 8.0e+00, last 8.0e+00, not finite in 1 of 5 steps"
    assert site_series(source, "none:out").series == ()


def test_sparkline_joins_steps_by_their_maximum():
    points = tuple(SeriesPoint(step, 8.0 if step == 41 else 1.0) for step in range(100))
    line = sparkline(Series("rms", 0, points, ""), 10)
    assert len(line) == 10
    assert line[4] == "█"
    bad = (*points[:50], SeriesPoint(50, None), *points[51:])
    assert sparkline(Series("rms", 0, bad, ""), 10)[5] == "%"
    assert sparkline(Series("rms", 0, (), ""), 10) == ""


def test_metric_series_are_the_metrics_of_the_run(tmp_path):
    found = metric_series(RunSource.open(toy_run(tmp_path / "run")))
    assert {each.name for each in found.series} == {"latency_s"}
    assert [each.value for each in found.series[0].points] == [0.25, 0.5, 0.75, 1.0]


def test_browse_screen_shows_a_site_over_steps(tmp_path):
    run = toy_run(tmp_path / "run")

    async def go():
        app = TapscopeApp(lambda: RunSource.open(run))
        async with app.run_test(size=(120, 36)) as pilot:
            driver = Driver(app, pilot)
            await driver.settle()
            await driver.press("v", "v", "v")
            for _ in range(200):
                text = app.screen.query_one("#tensor").text
                if "latency_s" in text:
                    break
                await asyncio.sleep(0.02)
            assert "rms rank 0" in text
            assert "|max| rank 1" in text
            assert "latency_s rank 0" in text
            assert "steps 0 to 3" in text

    asyncio.run(go())


@pytest.mark.parametrize(
    ("name", "text"),
    [("latency_s", "500 ms to 1,200,000 s, last 1,200,000 s"), ("queue_bytes", "0 B to 1.2 MB, last 1.2 MB"),
     ("num_tokens", "0 to 1,200,000, last 1,200,000"),
     ("kv_cache_usage", "50.0 % to 120000000.0 %, last 120000000.0 %")],
)  # fmt: skip
def test_series_are_shown_in_the_unit_of_their_name(name, text):
    assert series_of(name, None, [(0, 0.5), (1, 1.2e6)]).text == text


def test_live_series_have_the_share_of_the_kv_cache(tmp_path):
    with RunFactory(tmp_path / "run") as run:
        for step in range(3):
            run.step()
            for name, value in (("loss", 1.0), ("kv_pages_used", 10.0 * step), ("kv_pages_total", 80.0)):
                run.writers[0].line({"type": "metric", "step": step, "name": name, "value": value})
    found = {each.name: each for each in live_series(LiveRun(tmp_path / "run").read()).series}
    assert list(found) == ["kv_cache_usage", "loss", "kv_pages_used"]
    assert [point.text for point in found["kv_cache_usage"].points] == ["0.0 %", "12.5 %", "25.0 %"]
