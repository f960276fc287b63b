"""What the screen looks like, byte for byte; `pytest --snapshot-update` accepts a changed picture."""

import asyncio

import pytest
import textual
from dashboard_runs import toy_run

from tapscope.dashboard.app import TapscopeApp
from tapscope.dashboard.sources import RunSource
from tapscope.run import open_run

TEXTUAL = "8.2.8"
"""The version the pictures were drawn with; another one may draw the same screen with other bytes."""

SIZES = {"small": (60, 24), "medium": (100, 30), "large": (160, 40)}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return toy_run(tmp_path_factory.mktemp("pictures") / "base")


@pytest.fixture(scope="module", autouse=True)
def pinned_textual():
    if textual.__version__ != TEXTUAL:
        pytest.fail(
            f"these pictures need Textual {TEXTUAL}, here is {textual.__version__}: pip install textual=={TEXTUAL}"
        )


def pressing(*keys):
    async def before(pilot):
        for key in (None, *keys):
            if key is not None:
                await pilot.press(key)
            for _ in range(400):
                await pilot.pause()
                if pilot.app.screen_stack[1].settled:
                    break
                await asyncio.sleep(0.01)
        await pilot.pause()

    return before


def picture(snap_compare, base, size, *keys, **options):
    app = TapscopeApp(lambda: RunSource(open_run(base)), **options)
    assert snap_compare(app, terminal_size=SIZES[size], run_before=pressing(*keys))


@pytest.mark.parametrize("size", SIZES)
def test_browse_at_the_first_non_finite_record(snap_compare, base, size):
    picture(snap_compare, base, size, "n", "n")


def test_browse_as_histogram(snap_compare, base):
    picture(snap_compare, base, "medium", "v")


def test_browse_as_values(snap_compare, base):
    picture(snap_compare, base, "large", "n", "n", "v", "v")


def test_browse_the_tree_alone_on_a_narrow_screen(snap_compare, base):
    picture(snap_compare, base, "small", "shift+tab", "enter")


def test_browse_in_light_colours(snap_compare, base):
    picture(snap_compare, base, "medium", theme="light")


def test_a_search_without_a_match(snap_compare, base):
    picture(snap_compare, base, "medium", "slash", "x", "y")


def test_help(snap_compare, base):
    picture(snap_compare, base, "large", "question_mark")
