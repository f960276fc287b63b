"""Screenshots, compared byte for byte; `pytest --snapshot-update` accepts changed ones."""

import asyncio
from pathlib import Path

import pytest
import textual
from comparator_toy import Toy, weights
from dashboard_runs import toy_run
from textual.widgets import Input

from tapscope.comparator import CompareOptions
from tapscope.dashboard.app import TapscopeApp
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.diff_source import DiffSource
from tapscope.sources import open_run

TEXTUAL = "8.2.8"
"""Version of Textual that drew the screenshots; another version may draw the same screen with other bytes."""

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
            for _ in range(6000):  # upper bound
                await pilot.pause()
                if all(getattr(screen, "settled", True) for screen in pilot.app.screen_stack):
                    break
                await asyncio.sleep(0.01)
            else:
                pytest.fail(f"the screen still waits for an answer after {key or 'its start'}")
        for field in pilot.app.screen.query(Input):
            field.cursor_blink = False  # otherwise a slow machine may draw the screen while the cursor is hidden
        await pilot.pause()

    return before


def picture(snap_compare, base, size, *keys, **options):
    app = TapscopeApp(lambda: RunSource(open_run(base)), **options)
    assert snap_compare(app, terminal_size=SIZES[size], run_before=pressing(*keys))


@pytest.mark.parametrize("size", SIZES)
def test_browse_screen_at_the_first_nonfinite_record(snap_compare, base, size):
    picture(snap_compare, base, size, "n", "n")


def test_browse_screen_with_histogram(snap_compare, base):
    picture(snap_compare, base, "medium", "v")


def test_browse_screen_with_values(snap_compare, base):
    picture(snap_compare, base, "large", "n", "n", "v", "v")


def test_browse_screen_with_the_tree_alone_when_narrow(snap_compare, base):
    picture(snap_compare, base, "small", "shift+tab", "enter")


def test_browse_screen_in_light_theme(snap_compare, base):
    picture(snap_compare, base, "medium", theme="light")


def test_browse_screen_with_an_empty_search(snap_compare, base):
    picture(snap_compare, base, "medium", "slash", "x", "y")


def test_heat_map_of_a_run_with_a_layer_unfolded(snap_compare, base):
    picture(snap_compare, base, "medium", "m", *["j"] * 4, "right")


def test_help_screen(snap_compare, base):
    picture(snap_compare, base, "large", "question_mark")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """fp32 against bf16 with one damaged token. Values are on a grid, because processors differ in the last digits."""

    def on_a_grid(values):
        return (values * 4096).round() / 4096

    def spoil(values):
        if len(values) > 5:
            values[5] *= 1.5
        return values

    root, tables = tmp_path_factory.mktemp("pairs"), weights()
    prompts = {"0": list(range(3, 20)), "1": list(range(40, 51))}
    site = "model.layers.2.mlp.down_proj:out"
    Toy(tables, hooks={site: on_a_grid}).write(root / "base", prompts, steps=(11, 14)).close()
    Toy(tables, dtype="bfloat16", hooks={site: spoil}).write(root / "target", prompts, steps=(11, 14)).close()
    return root


def diff_picture(snap_compare, pair, monkeypatch, size, *keys, **options):
    monkeypatch.chdir(pair)  # so that the command in the answer has no machine-specific path

    def open_source(way, progress):
        return DiffSource.open((Path("base"), Path("target")), CompareOptions(), progress)

    app = TapscopeApp(open_diff=(open_source, "base → target"), **options)
    assert snap_compare(app, terminal_size=DIFF_SIZES[size], run_before=pressing(*keys))


DIFF_SIZES = {"tiny": (58, 20), "small": (80, 24), "medium": (120, 40), "large": (160, 40)}


@pytest.mark.parametrize("size", DIFF_SIZES)
def test_diff_screen_at_the_culprit(snap_compare, pair, monkeypatch, size):
    diff_picture(snap_compare, pair, monkeypatch, size)


def test_diff_screen_of_everything_with_tokens(snap_compare, pair, monkeypatch):
    diff_picture(snap_compare, pair, monkeypatch, "medium", "d", "v")


def test_diff_screen_of_one_step_with_values(snap_compare, pair, monkeypatch):
    diff_picture(snap_compare, pair, monkeypatch, "medium", "right_square_bracket", "v", "v", theme="light")
