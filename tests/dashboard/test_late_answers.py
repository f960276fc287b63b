"""Results of workers that arrive out of order, before the first layout, or while others are pending."""

import asyncio

import numpy as np
import pytest
from dashboard_runs import toy_run
from factories import RunFactory
from held_threads import HeldThreads

from tapscope.comparator import CompareOptions
from tapscope.core.errors import RunCorruptError
from tapscope.dashboard.app import TapscopeApp
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.diff_source import DiffSource
from tapscope.dashboard.model.permalink import parse_permalink
from tapscope.dashboard.model.value_map import value_map
from tapscope.dashboard.screens import browse_base, live_tail
from tapscope.dashboard.screens.modules import ModulesScreen
from tapscope.dashboard.screens.tensor import TensorScreen
from tapscope.run_format.directory import RECORDER_FILE

pytestmark = pytest.mark.usefixtures("no_rest")

SITES = [f"model.layers.{layer}.mlp.{name}:out" for layer in range(9) for name in ("up_proj", "down_proj")]
BAD = SITES[13]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return toy_run(tmp_path_factory.mktemp("late") / "run")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    for name in ("base", "target"):
        with RunFactory(root / name) as made:
            made.step(grid=(40,))
            values = np.arange(40 * 300, dtype=np.float32).reshape(40, 300)
            for i, site in enumerate(SITES):
                wrong = name == "target" and i >= SITES.index(BAD)
                made.put(site, values * np.where(wrong & (values % 7 == i % 5), np.float32(1.5), np.float32(1)))
    return root


class Held:
    """Test driver of a screen whose workers wait until the test releases them."""

    def __init__(self, app, pilot, threads):
        self.app, self.pilot, self.threads = app, pilot, threads

    @property
    def screen(self):
        return self.app.screen

    async def press(self, *keys):
        """Press keys and wait until they are handled; their workers have started by then."""
        for key in keys:
            self.app.simulate_key(key)
            await self.pilot.pause()

    async def answer(self, *names):
        for name in names:
            which = 0
            if isinstance(name, tuple):
                name, which = name
            self.threads.answer(name, which)
            await self.pilot.pause()

    async def until(self, condition):
        for _ in range(6000):  # upper bound
            if condition():
                return
            await self.pilot.pause()
        pytest.fail("the screen never met the condition")

    async def settle(self):
        """Release all workers, including those that start meanwhile."""

        def is_quiet():
            self.threads.answer_all()
            return all(each.settled for each in self.app.screen_stack[1:] if hasattr(each, "settled"))

        await self.until(is_quiet)
        await self.pilot.pause()

    async def answer_all(self, *, but):
        """Release all workers except those named ``but``, including those that start meanwhile."""
        quiet = 0
        while quiet < 3:
            quiet = 0 if self.threads.answer_all(but=but) else quiet + 1
            await self.pilot.pause()


def drive(monkeypatch, app, test, size=(110, 36)):
    async def go():
        threads = HeldThreads(monkeypatch)
        async with app.run_test(size=size) as pilot:
            held = Held(app, pilot, threads)
            await held.until(lambda: len(app.screen_stack) > 1)
            await test(held)

    asyncio.run(go())


def browse(path, at=None):
    return TapscopeApp(lambda: RunSource.open(path), at=at)


def compare(pair):
    def open_source(way, progress):
        paths = (pair / "base", pair / "target")
        return DiffSource.open(paths, CompareOptions(), progress, way)

    return TapscopeApp(open_diff=(open_source, "base → target"))


# --- overtaken answers -----------------------------------------------------------------------------


def test_of_two_comparisons_the_one_asked_last_is_shown(pair, monkeypatch):
    async def test(held):
        await held.settle()
        before = held.screen.source
        await held.press("r", "x")  # read both runs again, then swap the current comparison
        assert held.threads.count("load") == 2
        await held.answer(("load", 1))
        await held.answer_all(but="load")
        swapped = held.screen.source
        assert swapped.report.baseline.name == "target"
        assert swapped.shares_runs(before)
        await held.answer("load")
        await held.settle()
        assert held.screen.source is swapped
        assert held.screen.way.swapped

    drive(monkeypatch, compare(pair), test)


def test_an_overtaken_comparison_neither_settles_the_screen_nor_closes_its_runs(pair, monkeypatch):
    closed = []
    monkeypatch.setattr(DiffSource, "close", lambda self: closed.append(self))

    async def test(held):
        await held.settle()
        before = held.screen.source
        await held.press("r", "x")
        await held.answer("load")
        await held.answer_all(but="load")
        assert not held.screen.settled
        assert before not in closed
        assert len(closed) == 1
        await held.settle()
        assert held.screen.source.report.baseline.name == "target"
        assert len(closed) == 1

    drive(monkeypatch, compare(pair), test)


def test_findings_of_the_comparison_before_are_not_shown(pair, monkeypatch):
    async def test(held):
        await held.settle()
        await held.press("d", "d")
        assert held.threads.count("load_findings") == 2
        await held.press("x")
        await held.answer("load")
        await held.answer(("load_findings", 2))
        await held.answer("load_findings", "load_findings")
        every = held.screen.source.report.findings
        assert all(any(found is each for each in every) for found in held.screen.table.findings)

    drive(monkeypatch, compare(pair), test)


def test_of_two_readings_of_a_run_the_one_asked_last_is_shown(run, monkeypatch):
    async def test(held):
        await held.settle()
        await held.press("r", "r")
        await held.answer(("load_source", 1))
        latest = held.screen.source
        await held.answer("load_source")
        assert held.screen.source is latest
        await held.settle()

    drive(monkeypatch, browse(run), test)


def test_a_key_pressed_twice_opens_one_screen(run, monkeypatch):
    async def test(held):
        await held.settle()
        await held.press("T", "T")
        await held.settle()
        assert isinstance(held.screen, ModulesScreen)
        await held.press("escape")
        assert held.screen is held.app.screen_stack[1]
        await held.press("i", "i")
        await held.settle()
        await held.press("escape")
        assert held.screen is held.app.screen_stack[1]

    drive(monkeypatch, browse(run), test)


async def open_tensor(held):
    await held.settle()
    await held.press("c")
    await held.settle()
    assert isinstance(held.screen, TensorScreen)


def test_tokens_are_in_the_order_that_was_chosen_last(pair, monkeypatch):
    async def test(held):
        await open_tensor(held)
        await held.press("o", "o")
        await held.answer(("load_tokens", 1), "load_tokens")
        assert held.screen._tokens.order == "position"

    drive(monkeypatch, compare(pair), test)


def test_the_cursor_goes_to_the_search_that_came_last(pair, monkeypatch):
    async def test(held):
        await open_tensor(held)
        await held.press("g", "home", *("x", "0", "enter"))
        await held.answer("load_place")
        first = held.screen.grid.row, held.screen.grid.column
        await held.press("f", "b")
        await held.answer(("load_place", 1))
        last = held.screen.grid.row, held.screen.grid.column
        assert last > first
        await held.answer("load_place")
        assert (held.screen.grid.row, held.screen.grid.column) == last

    drive(monkeypatch, compare(pair), test)


# --- settled --------------------------------------------------------------------------------------


def test_screen_is_not_settled_while_the_marks_of_the_tree_are_counted(run, monkeypatch):
    async def test(held):
        await held.settle()
        await held.press("full_stop")
        await held.answer_all(but="load_counts")
        assert not held.screen.settled
        await held.settle()

    drive(monkeypatch, browse(run), test)


def test_screen_is_not_settled_between_a_table_and_the_records_below_it(run, monkeypatch):
    async def test(held):
        await held.answer("load_source")
        await held.answer("load_table")
        assert not held.app.screen_stack[1].settled
        await held.settle()
        assert held.screen.link.endswith("[1,7]")

    at = parse_permalink("run/model.layers.2.self_attn.o_proj:out@1.0[1,7]")
    drive(monkeypatch, browse(run, at), test)


async def open_detail(held):
    await held.settle()
    await held.press("o", "v", "v")
    await held.settle()
    await held.press("v")
    assert held.screen.pair.view == "detail"


def test_screen_is_not_settled_while_the_detail_of_another_finding_is_measured(pair, monkeypatch):
    async def test(held):
        await open_detail(held)
        await held.press("j")
        assert held.threads.count("load_detail") == 2
        await held.answer("load_detail")
        await held.answer_all(but="load_detail")
        assert not held.screen.settled
        await held.settle()
        assert held.screen.table.finding.site == SITES[14]
        assert held.screen.pair.detail is not None

    drive(monkeypatch, compare(pair), test)


def test_screen_settles_when_a_detail_that_is_no_longer_looked_at_is_there(pair, monkeypatch):
    async def test(held):
        await open_detail(held)
        await held.press("v", "j")
        await held.answer_all(but="load_detail")
        await held.answer("load_detail")
        assert held.screen.table.finding.site == SITES[14]
        assert held.screen.settled

    drive(monkeypatch, compare(pair), test)


# --- a site over steps, of a run that grows ---------------------------------------------------------


def test_a_site_over_steps_is_read_again_with_the_run(tmp_path, monkeypatch):
    made = RunFactory(tmp_path / "run")
    values = np.ones((3, 4), np.float32)
    made.step(grid=(3,))
    made.put("a:out", values)

    async def test(held):
        await held.settle()
        await held.press("v", "v", "v")
        await held.settle()
        assert held.screen.tensor.view == "steps"
        assert len(held.screen.tensor.series[0].series[0].points) == 1
        made.step(grid=(3,))
        made.put("a:out", values)
        await held.press("r")
        await held.settle()
        assert len(held.screen.tensor.series[0].series[0].points) == 2

    drive(monkeypatch, browse(tmp_path / "run"), test)


def test_a_run_that_could_not_be_read_once_is_followed_on(tmp_path, monkeypatch):
    monkeypatch.setattr(live_tail, "FOLLOW_S", 0)
    monkeypatch.setattr(browse_base, "FOLLOW_S", 0)
    made = RunFactory(tmp_path / "run")
    (tmp_path / "run" / RECORDER_FILE).write_text('{"host": "elsewhere"}')

    def step():
        made.step(grid=(3,))
        made.put("a:out", np.ones((3, 4), np.float32))

    fails = [False]

    def open_source():
        if fails[0]:
            raise RunCorruptError("not now")
        return RunSource.open(tmp_path / "run")

    async def test(held):
        await held.settle()
        await held.press("t")
        await held.settle()
        step()
        fails[0] = True
        await held.until(lambda: held.threads.answer_all() >= 0 and "not now" in held.screen.bar.said)
        fails[0] = False
        await held.until(lambda: held.threads.answer_all() >= 0 and held.screen.query_now.step == 1)
        assert held.screen.following

    step()
    drive(monkeypatch, TapscopeApp(open_source), test)


# --- before the layout ------------------------------------------------------------------------------


def test_map_that_is_there_before_the_layout_begins_at_the_value_under_the_cursor(pair, monkeypatch):
    async def test(held):
        await open_tensor(held)
        screen = held.screen
        assert not screen.map.size.width  # never shown before
        screen.map.set_map(value_map(screen.values))
        screen.map.show_place(39, 299)
        await held.press("m")
        await held.until(lambda: screen.map.rectangle is not None)
        rows, columns = screen.map.rectangle
        assert rows[0] <= 39 < rows[1]
        assert columns[0] <= 299 < columns[1]

    drive(monkeypatch, compare(pair), test)


def test_no_key_is_lost_where_text_scrolls(run, monkeypatch):
    async def test(held):
        await held.settle()
        await held.press("tab")
        tensor = held.screen.tensor
        assert held.screen.active is tensor
        for key in "jjj":
            held.app.simulate_key(key)
        await held.pilot.pause()
        assert tensor.scroll_offset.y == 3
        held.app.simulate_key("question_mark")
        await held.pilot.pause()
        for key in "jjj":
            held.app.simulate_key(key)
        await held.pilot.pause()
        assert held.screen.query_one("#help").scroll_offset.y == 3

    drive(monkeypatch, browse(run), test, size=(60, 20))
