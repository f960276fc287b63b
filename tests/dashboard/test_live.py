"""Live runs: incremental reading, and pausing and replay of earlier steps, on the screen and on the page."""

import asyncio
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from chromium import check_accessibility, page_of
from dashboard_driver import Driver
from factories import RunFactory
from hypothesis import given
from hypothesis import strategies as st
from web_server import serving

from tapscope.core.errors import RunExistsError
from tapscope.dashboard import live_run
from tapscope.dashboard.app import TapscopeApp
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.live_run import LiveRun, LiveRuns
from tapscope.dashboard.model.live import live_facts, live_series, view_at
from tapscope.dashboard.screens import live as live_screen
from tapscope.dashboard.widgets.status_bar import StatusBar
from tapscope.run_format.manifest import INDEX, rank_dir
from tapscope.run_format.writer import RankWriter


def lines_of(path, rank=0):
    return rank_dir(path, rank) / INDEX


def append(path, *lines):
    with lines_of(path).open("ab") as file:
        file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def unclosed(path):
    """Create a run whose recorder was killed."""
    file = lines_of(path)
    file.write_bytes(b"".join(line for line in file.read_bytes().splitlines(True) if b'"close"' not in line))
    return path


def step_of(step, **counts):
    return {"type": "step", "at": "end", "step": step, "seen": 1, "sent": 1, "dropped": 0, "failed": 0, **counts}


@pytest.fixture
def run(tmp_path):
    """Six steps of two records each, with a NaN in the fourth and an increasing latency; the run is not closed."""
    with RunFactory(tmp_path / "live") as made:
        for step in range(6):
            made.step()
            made.put("a:out", np.full((2, 2), np.nan if step == 3 else 1.0, np.float32))
            made.put("b:out", np.ones((2, 2), np.float32))
            made.writers[0].line({"type": "metric", "step": step, "name": "latency_s", "value": 0.25 * (step + 1)})
    return unclosed(tmp_path / "live")


# --- reading -----------------------------------------------------------------------------------------


def test_live_run_reads_appended_lines_only(tmp_path):
    with RunFactory(tmp_path / "run") as run:
        live = LiveRun(tmp_path / "run")
        run.step()
        run.put("a:out", np.ones((2, 2), np.float32))
        run.step()
    view = live.read()
    assert (view.num_records, view.state) == (1, "closed")
    number = view.number
    assert live.read().number == number
    with lines_of(tmp_path / "run").open("ab") as lines:
        lines.write(b'{"type":"record","site":"b:out","step":1,"stats":{"nan":2}}\n{"type":"rec')
    view = live.read()
    assert (view.num_records, view.number) == (2, number + 1)
    assert [each.text for each in view.anomalies] == ["b:out step 1 rank 0"]
    with lines_of(tmp_path / "run").open("ab") as lines:
        lines.write(b'ord","site":"c:out","step":1}\nnot json\n[1]\n')
    assert live.read().num_records == 3


def test_live_run_reports_a_dead_recorder_once(tmp_path, monkeypatch):
    with RunFactory(tmp_path / "run") as run:
        run.step()
    live = LiveRun(unclosed(tmp_path / "run"))
    assert live.read().state == "dead"
    monkeypatch.setattr(live_run, "may_grow", lambda path: True)
    first = live.read()
    assert first.state == "recording"
    monkeypatch.undo()
    second = live.read()
    assert (second.state, second.number > first.number) == ("dead", True)
    assert live.read().number == second.number


def test_a_second_writer_of_a_shown_run_is_refused_and_the_view_goes_on(tmp_path):
    with RunFactory(tmp_path / "run") as run:
        live, values = LiveRun(tmp_path / "run"), np.ones((2, 2), np.float32)
        run.step()
        run.put("a:out", values)
        run.step()
        before = live.read()
        with pytest.raises(RunExistsError, match="already has a writer"):
            RankWriter(tmp_path / "run", 0)
        assert live.read() == before
        run.put("b:out", values)
    assert (live.read().num_records, live.read().state) == (2, "closed")


def test_live_polling_continues_where_it_stopped(tmp_path, monkeypatch):
    with RunFactory(tmp_path / "run") as run:
        for _ in range(40):
            run.step()
            run.put("a:out", np.ones((4, 4), np.float32))
    monkeypatch.setattr(live_run, "MAX_READ", 4096)
    runs, whole = LiveRuns(), 40
    counts = [runs.of(tmp_path / "run").read().num_records for _ in range(100)]
    assert counts[0] < whole
    assert counts[-1] == whole


def test_live_run_is_read_once_for_all_viewers(run, monkeypatch):
    blocks = []
    take_block = LiveRun._take_block
    monkeypatch.setattr(LiveRun, "_take_block", lambda *args: (blocks.append(args[2]), take_block(*args)))
    runs = LiveRuns()
    views = [runs.of(run).read(60.0) for _ in range(20)]
    assert len(blocks) == 1
    assert [view.num_records for view in views] == [12] * 20
    append(run, {"type": "record", "site": "a:out", "step": 7})
    assert runs.of(run).read(60.0).num_records == 12, "as old as the viewers allow"
    assert runs.of(run).read().num_records == 13


def test_live_run_skips_damaged_lines_of_a_block(run):
    with lines_of(run).open("ab") as file:
        file.write(b'{"type": "record", "step": "x"}\n\xff\n[]\n')
        file.write(b'{"type": "record", "site": "a:out", "step": 9}\n{"type": "rec')
    live = LiveRun(run)
    assert live.read().num_records == 13
    with lines_of(run).open("ab") as file:
        file.write(b'ord", "site": "a:out", "step": 9}\n')
    assert live.read().num_records == 14


def test_live_run_begins_again_where_another_run_replaces_it(run, tmp_path):
    live = LiveRun(run)
    assert live.read().num_records == 12
    shutil.rmtree(run)
    assert (live.read().num_records, live.read().points) == (0, ())
    with RunFactory(run) as made:
        made.step()
        made.put("c:out", np.ones((2, 2), np.float32))
    view = live.read()
    assert (view.num_records, view.num_nonfinite, view.state) == (1, 0, "closed")


def test_live_run_counts_the_records_of_a_compacted_run(run):
    from tapscope.cli import main

    main(["repair", str(run)])
    live = LiveRun(run)
    before = live.read()
    assert main(["compact", str(run)]) == 0
    after = live.read()
    assert (after.num_records, after.num_steps) == (before.num_records, before.num_steps) == (12, 6)


def test_live_run_keeps_the_latest_steps_and_the_sums_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(live_run, "MAX_STEPS", 3)
    with RunFactory(tmp_path / "run") as run:
        for _ in range(8):
            run.step()
            run.put("a:out", np.full((1, 2), np.nan, np.float32))
    view = LiveRun(tmp_path / "run").read()
    assert [point.step for point in view.points] == [5, 6, 7]
    assert (view.num_steps, view.num_records, view.num_nonfinite) == (8, 8, 8)
    assert [point.num_records for point in view.points] == [6, 7, 8]
    with pytest.raises(ValueError, match="invalid step 4: the oldest kept step is 5"):
        view_at(view, 4)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=12))
def test_view_at_a_step_has_what_was_recorded_until_then(tmp_path_factory, steps):
    """With the lines of steps in any order, the view at a step equals the view of the lines up to that step."""
    root = tmp_path_factory.mktemp("live")
    with RunFactory(root / "run") as run:
        run.step()
    lines = [
        line
        for number, num_records, num_dropped in steps
        for line in (
            *[{"type": "record", "site": "a:out", "step": number + 1}] * num_records,
            step_of(number + 1, dropped=num_dropped),
        )
    ]
    append(root / "run", *lines)
    whole = LiveRun(root / "run").read()
    for point in whole.points:
        found = view_at(whole, point.step)
        until = [line for line in lines if line["step"] <= point.step]
        assert found.num_records == sum(line["type"] == "record" for line in until)
        assert found.num_dropped == sum(line.get("dropped", 0) for line in until)
        assert found.points[-1] == point
        assert found.records_per_s is None
    last = view_at(whole, whole.points[-1].step)
    assert replace(last, records_per_s=whole.records_per_s) == whole


def test_live_series_are_the_records_of_each_step_and_the_metrics(run):
    view = LiveRun(run).read()
    series = {each.name: [point.value for point in each.points] for each in live_series(view).series}
    assert series["records"] == [2.0] * 6
    later = replace(view, points=view.points[2:])  # the first steps of a long run are evicted
    assert [point.step for point in live_series(later).series[0].points] == [3, 4, 5]
    assert series["latency_s"] == [0.25 * (step + 1) for step in range(6)]
    assert {fact.label: fact.text for fact in live_facts(view)} == {
        "finished steps": "6",
        "last step": "5",
        "records": "12",
        "records/s": "0",
        "dropped": "0",
        "not finite": "1, first a:out step 3 rank 0",
        "not read yet": "nothing",
    }


# --- the screen --------------------------------------------------------------------------------------


def check(run, test, **options):
    async def go():
        app = TapscopeApp(lambda: RunSource.open(run), live=run, **options)
        async with app.run_test(size=(100, 30)) as pilot:
            driver = Driver(app, pilot)
            await until(pilot, lambda: app.screen.active.shown is not None)
            await test(app, driver)

    asyncio.run(go())


async def until(pilot, condition):
    for _ in range(800):
        await pilot.pause(0.01)
        if condition():
            return
    raise AssertionError("timed out")


def shown(app):
    return app.screen.query_one("#live").text


def status(app):
    return str(app.screen.query_one("#status").render())


def test_live_screen_follows_pauses_steps_back_and_replays(run, monkeypatch):
    monkeypatch.setattr(live_screen, "READ_S", 0.1)
    monkeypatch.setattr(live_screen, "REPLAY_S", 0.05)

    async def test(app, driver):
        screen = app.screen
        assert "DEAD: the recorder ended without closing the run" in status(app)
        assert "last step 5" in shown(app)
        assert "% a:out step 3 rank 0" in shown(app)
        await driver.press("left_square_bracket", "left_square_bracket", "comma")
        assert "PAUSED AT STEP 2" in status(app)
        assert "last step 2" in shown(app)
        assert "records 6" in shown(app)
        assert "a:out step 3" not in shown(app)
        append(run, {"type": "record", "site": "a:out", "step": 6}, step_of(6))
        await until(driver.pilot, lambda: screen._view.num_steps == 7)
        assert "last step 2" in shown(app)  # paused: new steps do not move the view
        await driver.press("space")
        assert "last step 6" in shown(app)
        await driver.press("right_square_bracket")
        assert screen.query_one("KeyBar").said == "This is the last finished step."
        await driver.press("colon")
        screen.query_one("#line").value = "99"
        await driver.press("enter")
        assert "Unknown step '99'; steps that are kept: 0 to 6" in screen.query_one("KeyBar").said
        screen.query_one("#line").value = "4"
        await driver.press("enter")
        assert "PAUSED AT STEP 4" in status(app)
        seen = []
        set_header = StatusBar.set_header
        monkeypatch.setattr(
            StatusBar, "set_header", lambda bar, header: (seen.append(header.state[:16]), set_header(bar, header))
        )
        await driver.press("p")
        await until(driver.pilot, lambda: seen[-1:] == ["DEAD: the record"])
        assert [each for each in dict.fromkeys(seen) if "REPLAY" in each] == [f"REPLAY AT STEP {i}" for i in (4, 5, 6)]
        assert "last step 6" in shown(app)
        await driver.press("escape")
        assert app.screen is driver.screen

    check(run, test)


def test_live_screen_says_that_no_step_has_finished(tmp_path):
    with RunFactory(tmp_path / "run"):
        pass
    unclosed(tmp_path / "run")

    async def test(app, driver):
        for key in ("space", "left_square_bracket", "p"):
            await driver.press(key)
            assert app.screen.query_one("KeyBar").said == "No step has finished yet."

    check(tmp_path / "run", test)


def test_live_screen_shows_another_run_that_replaces_it(run, monkeypatch):
    monkeypatch.setattr(live_screen, "READ_S", 0.1)

    async def test(app, driver):
        await driver.press("left_square_bracket")
        shutil.rmtree(run)
        await until(driver.pilot, lambda: "finished steps 0" in shown(app))
        with RunFactory(run) as made:
            made.step()
        await until(driver.pilot, lambda: "finished steps 1" in shown(app))
        assert "CLOSED" in status(app)

    check(run, test)


# --- the page ----------------------------------------------------------------------------------------


WATCH = """() => {
  const status = document.querySelector(".controls [role=status]");
  window.shown = [];
  const all = { characterData: true, childList: true, subtree: true };
  new MutationObserver(() => window.shown.push(status.textContent)).observe(status, all);
}"""
"""Records every text of the element that names the step."""


def test_page_live_pauses_steps_back_and_replays(chromium, run):
    with serving(run.parent) as (_, link, _), page_of(chromium, link, bypass_csp=True) as page:
        page.click("td a:text-is('steps and metrics')")
        page.wait_for_selector(".state:has-text('dead: the recorder ended without closing the run')")
        facts = page.locator("dl.facts")
        assert "last step\n5" in facts.inner_text()
        page.click("text=Step back")
        page.click("text=Step back")
        page.click("text=Step back")
        page.wait_for_selector("text=paused at step 2")
        assert re.search(r"records\n6\n", facts.inner_text())
        assert page.locator("li:has-text('a:out step 3')").count() == 0
        append(run, {"type": "record", "site": "a:out", "step": 6}, step_of(6))
        page.wait_for_function("document.querySelector('input[type=range]').max === '6'")
        assert "last step\n2" in facts.inner_text()
        check_accessibility(page)
        page.evaluate(WATCH)
        page.get_by_role("button", name="Replay").click()
        page.wait_for_selector("button:text-is('Pause')")  # the replay has caught up with the recording
        shown = list(dict.fromkeys(page.evaluate("window.shown")))
        replayed = [text for text in shown if text.startswith("replay") and text != "replay at step 2"]
        assert replayed == [f"replay at step {i}" for i in (3, 4, 5, 6)]
        assert "last step\n6" in facts.inner_text()
        page.locator("input[type=range]").focus()
        page.keyboard.press("ArrowLeft")
        page.wait_for_selector("text=paused at step 5")
