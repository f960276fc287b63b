"""Runs that vanish, change or have unusual tensors while they are shown, and terminals of every size and kind."""

import asyncio
import os
import shutil

import ml_dtypes
import numpy as np
import pytest
from dashboard_driver import Driver
from dashboard_runs import toy_run
from factories import RunFactory
from soak_cases import mostly_soak
from terminal_driver import drain_until_exit, read_until
from terminal_driver import terminal as terminal
from toy_pair import toy_pair

from tapscope.cli import main
from tapscope.comparator import CompareOptions
from tapscope.dashboard.app import TapscopeApp
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.diff_source import DiffSource

SIZES = [(20, 6), *(pytest.param(size, marks=pytest.mark.soak) for size in ((40, 12), (80, 24), (400, 100)))]
TERMINALS = [
    "dumb",
    *(pytest.param(name, marks=pytest.mark.soak) for name in ("linux", "vt100", "tmux-256color", "none")),
]


@pytest.fixture(autouse=True)
def quick(no_rest, monkeypatch, tmp_path):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def browsing(path):
    return TapscopeApp(lambda: RunSource.open(path), bookmarks=path.parent / "bookmarks.json")


def comparing(root):
    def open_source(way, progress):
        return DiffSource.open((root / "base", root / "target"), way.of(CompareOptions()), progress)

    return TapscopeApp(open_diff=(open_source, "base → target"), bookmarks=root / "bookmarks.json")


def check(app, test, size=(110, 36)):
    async def run():
        async with app.run_test(size=size) as pilot:
            driver = Driver(app, pilot)
            await driver.settle()
            await test(driver)

    asyncio.run(run())


async def press(driver, *keys):
    """Press the keys one by one, and the keys of every screen that opens."""
    for key in keys:
        driver.app.simulate_key(key)
        for _ in range(500):
            await driver.pilot.pause()
            if getattr(driver.app.screen, "settled", True) and driver.screen.settled:
                break
            await asyncio.sleep(0.01)


def said(driver):
    return driver.app.screen.query_one("KeyBar").said


# --- runs that change --------------------------------------------------------------------------------


def test_a_run_that_is_deleted_stays_on_the_screen_and_reading_it_again_says_so(tmp_path):
    run = toy_run(tmp_path / "run")

    async def test(driver):
        shutil.rmtree(run)
        await press(driver, "j", "v", "v", "v", "n", "full_stop", "i", "escape", "c", "escape")
        assert driver.screen.table.num_rows > 0
        await press(driver, "r")
        assert "reload failed, showing the previous state: " in said(driver)
        await press(driver, "j", "L", "escape", "e")

    check(browsing(run), test)


def test_a_run_that_is_compacted_while_shown_reads_the_same_values(tmp_path):
    run = toy_run(tmp_path / "run")

    async def test(driver):
        before = len(driver.screen.source.run.records)
        assert main(["compact", str(run)]) == 0
        await press(driver, "n", "n", "v", "v")
        assert "nan" in driver.screen.query_one("#tensor").text
        await press(driver, "r")
        assert said(driver) == "reloaded: no new records"
        assert len(driver.screen.source.run.records) == before

    check(browsing(run), test)


def test_a_torn_run_that_is_repaired_while_shown_reads_on(tmp_path):
    run = toy_run(tmp_path / "run")
    lines = run / "rank-00000" / "records.jsonl"
    cut = lines.read_bytes().rindex(b'{"type":"record"') + 40
    with lines.open("r+b") as file:
        file.truncate(cut)

    async def test(driver):
        before = len(driver.screen.source.run.records)
        assert "INCOMPLETE" in driver.screen.source.header.state
        assert any("cut off" in problem for problem in driver.screen.source.run.problems)
        assert main(["repair", str(run)]) == 0
        await press(driver, "n", "n", "v", "v")
        assert "nan" in driver.screen.query_one("#tensor").text
        await press(driver, "r")
        assert len(driver.screen.source.run.records) == before
        assert not driver.screen.source.run.problems
        await press(driver, "c", "j", "escape")

    check(browsing(run), test)


def test_a_run_that_is_replaced_is_shown_after_reading_again(tmp_path):
    run = toy_run(tmp_path / "run")

    async def test(driver):
        await press(driver, "full_stop", "full_stop", "j", "j")
        shutil.rmtree(run)
        with RunFactory(run) as other:
            other.step()
            other.put("new.site:out", np.ones((2, 3), np.float32))
        await press(driver, "c", "escape", "r")
        assert driver.screen.source.steps == (0,)
        await press(driver, "comma", "g", "j", "k", "v", "c", "escape")
        assert "new.site" in driver.screen.source.hint() or driver.screen.source.num_sites == 1

    check(browsing(run), test)


def test_segments_that_are_missing_are_a_sentence_and_statistics_stay(tmp_path):
    run = toy_run(tmp_path / "run")
    for file in run.glob("rank-00000/seg-*"):
        file.unlink()

    async def test(driver):
        text = driver.screen.query_one("#tensor").text
        assert "The values cannot be read: " in text
        assert "rms" in text
        await press(driver, "c")
        assert "cannot be read" in said(driver)

    check(browsing(run), test)


def test_runs_that_are_deleted_after_a_comparison_leave_its_result(tmp_path):
    root = toy_pair(tmp_path)

    async def test(driver):
        findings = driver.screen.table.num_rows
        shutil.rmtree(root / "target")
        await press(driver, "d", "b", "v", "v", "v", "v", "c", "escape", "a", "i", "escape", "d")
        await press(driver, "x")  # swapping reuses the measurements and reads nothing
        assert driver.screen.source.report.baseline.name == "target"
        await press(driver, "x", "r")
        assert "comparison failed, showing the previous one: " in said(driver)
        assert driver.screen.table.num_rows == findings

    check(comparing(root), test)


# --- odd tensors -------------------------------------------------------------------------------------

ODD = {
    "all_nan": np.full((3, 4), np.nan, np.float32),
    "empty": np.zeros((0, 5), np.float32),
    "no_columns": np.zeros((5, 0), np.float32),
    "scalar": np.array(7.5, np.float32),
    "five_axes": np.arange(96, dtype=np.float32).reshape(2, 3, 4, 2, 2),
    "complex": np.array([[1 + 2j, np.nan], [0, 3j]], np.complex64),
    "e4m3": np.array([[0.5, 448.0, np.nan]], ml_dtypes.float8_e4m3fn),
    "e5m2": np.array([[0.5, np.inf, -2.0]], ml_dtypes.float8_e5m2),
    "bool": np.array([[True, False]]),
    "uint8": np.arange(256, dtype=np.uint8),
    "int64": np.array([2**62, -(2**62)], np.int64),
    "bf16": np.ones((1, 1), ml_dtypes.bfloat16),
    "inf": np.full((2, 2), -np.inf, np.float16),
}


def odd_pair(root):
    for name, change in (("base", False), ("target", True)):
        with RunFactory(root / name) as run:
            run.step()
            for i, (site, values) in enumerate(ODD.items()):
                shown = values
                if change and values.size and values.dtype != np.bool_:
                    shown = (values.astype(np.complex64 if values.dtype.kind == "c" else np.float32) + 1).astype(
                        values.dtype
                    )
                run.put(f"layers.{i}.{site}:out", shown)
    return root


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", mostly_soak(["one", "pair"], default=["pair"]))
def test_every_view_of_odd_tensors_is_drawn(kind, tmp_path):
    root = odd_pair(tmp_path)
    views = {"one": ["v", "v", "v", "v"], "pair": ["v", "v", "v", "v", "v"]}[kind]
    values = ["n", "N", "f", "x", "0", "enter", "b", "m", "enter", "escape", "v", "v", "v", "v", "G", "end", "s", "o"]

    async def test(driver):
        await press(driver, *(["d"] if kind == "pair" else []), "g")
        for _ in ODD:
            await press(driver, *views, "c")
            if driver.app.screen is not driver.screen:
                await press(driver, *values)
                while driver.app.screen is not driver.screen:
                    await press(driver, "escape")
            await press(driver, "j")

    check(comparing(root) if kind == "pair" else browsing(root / "base"), test)


# --- terminals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["one", "pair"])
def test_every_screen_is_drawn_in_terminals_of_any_size(kind, size, tmp_path):
    keys = ["question_mark", "escape", "v", "c", "m", "v", "escape", "escape", "M", "escape", "apostrophe", "escape"]
    root = toy_pair(tmp_path)
    app = browsing(toy_run(tmp_path / "run")) if kind == "one" else comparing(root)
    more = ["L", "p", "escape"] if kind == "one" else ["a", "o", "d"]

    async def test(driver):
        await press(driver, *keys, *more, "tab", "enter", "tab", "enter")
        assert driver.app.screen is driver.screen

    check(app, test, size)


@pytest.mark.soak
def test_a_storm_of_resizes_leaves_the_screen_in_order(tmp_path):
    async def test(driver):
        for width, height in ((20, 6), (200, 60), (59, 19), (60, 20), (99, 5), (1, 1), (400, 100), (110, 36)) * 3:
            await driver.pilot.resize_terminal(width, height)
        await driver.pilot.pause()
        assert driver.app.size == (110, 36)
        assert driver.screen.has_class("-wide")
        assert str(driver.screen.query_one("#status").render()).startswith(" tapscope  run")

    check(browsing(toy_run(tmp_path / "run")), test)


@pytest.mark.parametrize("name", TERMINALS)
def test_view_works_in_terminals_of_every_kind(name, terminal, tmp_path, monkeypatch):
    """As over ssh, without OSC 52: copied text is also shown in the last line."""
    run, (fd, start) = toy_run(tmp_path / "base"), terminal
    process = start("view", str(run), "--theme", "ansi", environment={"TERM": name})
    read_until(fd, b"embed_tokens:out", process)
    os.write(fd, b"y")
    read_until(fd, b"copied: tapscope show", process)
    os.write(fd, b"q")
    assert drain_until_exit(fd, process) == 0
