"""Every key of every screen: each triggers its action, and the screen changes or shows why it does not."""

import asyncio

import pytest
from dashboard_driver import Driver
from dashboard_runs import toy_run
from toy_pair import toy_pair

from tapscope.comparator import CompareOptions
from tapscope.dashboard import keymap
from tapscope.dashboard.app import TapscopeApp
from tapscope.dashboard.bookmarks import Bookmark, Bookmarks
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.diff_source import DiffSource
from tapscope.dashboard.keymap import (
    BOOKMARK_KEYS,
    BY_ID,
    CELL_KEYS,
    COLUMN_KEYS,
    DIFF_KEYS,
    KEYS,
    LIVE_KEYS,
    MAP_KEYS,
    MODULE_KEYS,
    KeySpec,
)
from tapscope.dashboard.screens.help import HelpScreen, TextScreen
from tapscope.dashboard.screens.tensor import TensorScreen

BEFORE = {
    "browse": {
        "fold": ["shift+tab", "G"],
        "unfold": ["shift+tab", "g", "left"],
        "first": ["j"],
        "up": ["j"],
        "page_up": ["G"],
        "previous_step": ["full_stop"],
        "previous_rank": ["greater_than_sign"],
        "back": ["slash"],
    },
    "diff": {
        "up": ["j"],
        "page_up": ["G"],
        "first": ["G"],
        "culprit": ["j"],
        "zoom_out": ["plus"],
        "unfold_layer": ["shift+tab", "j", "j"],
        "fold_layer": ["shift+tab", "j", "j", "right"],
        "previous_step": ["full_stop"],
        "back": ["slash"],
        "previous_bad": ["b"],
    },
    "cells": {
        "up": ["j"],
        "left": ["l"],
        "page_up": ["G"],
        "first_row": ["j"],
        "first_column": ["l"],
        "next_above": ["x", "1", "enter"],
        "previous_above": ["x", "1", "enter"],
        "open_cell": ["m"],
        "largest": ["j"],
    },
    "live": {"next_step": ["comma", "comma"], "previous_step": []},
    "map": {
        "up": ["j"],
        "page_up": ["G"],
        "first": ["G"],
        "unfold_layer": ["j", "j"],
        "fold_layer": ["j", "j", "right"],
        "zoom_out": ["plus"],
    },
    "modules": {
        "up": ["j"],
        "page_up": ["G"],
        "first": ["G"],
        "fold_module": ["j", "j", "j"],
        "unfold_module": ["j", "j", "j"],
        "open_module": ["n"],
        "copy": ["n"],
    },
    "help": {"up": ["j"], "page_up": ["G"], "first": ["G"]},
    "bookmarks": {"up": ["j"], "page_up": ["G"], "first": ["G"]},
    "columns": {"up": ["j"], "page_up": ["G"], "first": ["G"], "usual_columns": ["space"]},
}
"""Screen -> action id -> keys to press before the action has an effect."""
UNCHANGED = {
    "cells": {"open_cell", "palette"},
    "live": {"up", "down", "page_up", "page_down", "first", "last"},  # nothing to scroll
}
"""Actions whose effect is not visible in the next frame."""
SPECS = {
    "browse": KEYS,
    "diff": DIFF_KEYS,
    "cells": CELL_KEYS,
    "live": LIVE_KEYS,
    "map": MAP_KEYS,
    "modules": MODULE_KEYS,
    "help": tuple(BY_ID[each.id] for each in (*TextScreen.BINDINGS, *HelpScreen.BINDINGS)),
    "bookmarks": BOOKMARK_KEYS,
    "columns": COLUMN_KEYS,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = toy_pair(tmp_path_factory.mktemp("keys"))
    toy_run(root / "run")
    return root


@pytest.fixture(autouse=True)
def quick(no_rest, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # the folder of exported files


def app_of(kind, root, file):
    if kind == "diff":

        def open_source(way, progress):
            return DiffSource.open((root / "base", root / "target"), way.of(CompareOptions()), progress)

        return TapscopeApp(open_diff=(open_source, "base → target"), bookmarks=file)
    return TapscopeApp(
        lambda: RunSource.open(root / "run"), bookmarks=file, live=root / "run" if kind == "live" else None
    )


async def begin(kind, driver):
    """Go to the screen, and to the middle of its content."""
    await driver.settle()
    if kind == "browse":
        await driver.press("full_stop", "greater_than_sign", "j")
    elif kind == "diff":
        await driver.press("d")
    elif kind == "cells":
        await driver.press("c")
        for _ in range(500):
            await driver.pilot.pause(0.01)
            if isinstance(driver.app.screen, TensorScreen) and driver.app.screen.settled:
                break
        await driver.press("j", "l")
    elif kind == "live":
        for _ in range(500):
            await driver.pilot.pause(0.01)
            if driver.app.screen.settled:
                break
    elif kind == "map":
        await driver.press("m")
        await quiet(driver)
    elif kind == "modules":
        await driver.press("full_stop", "T")  # step 1 has a non-finite value
        await quiet(driver)
    elif kind == "help":
        await driver.press("question_mark")
    elif kind == "bookmarks":
        await driver.press("apostrophe")
    elif kind == "columns":
        await driver.press("W")


async def quiet(driver):
    screen = driver.app.screen
    for _ in range(300):
        await driver.pilot.pause()
        if getattr(screen, "settled", True) and driver.screen.settled:
            return
        await asyncio.sleep(0.01)


def test_every_screen_of_the_keymap_is_pressed():
    screens = {
        name
        for name, specs in vars(keymap).items()
        if isinstance(specs, tuple) and specs and isinstance(specs[0], KeySpec)
    }
    assert {id(getattr(keymap, name)) for name in screens} <= set(map(id, SPECS.values())), screens


@pytest.mark.parametrize(
    "kind", ["bookmarks", *(pytest.param(kind, marks=pytest.mark.soak) for kind in SPECS if kind != "bookmarks")]
)
def test_every_key_starts_its_action_and_shows_an_effect(kind, root, tmp_path, monkeypatch):
    file = tmp_path / "bookmarks.json"
    problems = []

    async def press(spec, key):
        links = ("run/lm_head:out@1.0", "run/model.norm:out@2.0", "run/lm_head:out@3.0")
        for i, link in enumerate(links):
            Bookmarks(file).add(Bookmark(f"place {i}", link, (str(root / "run"),)))
        app = app_of(kind, root, file)
        async with app.run_test(size=(120, 40)) as pilot:
            driver = Driver(app, pilot)
            await begin(kind, driver)
            for earlier in BEFORE[kind].get(spec.id, ()):
                app.simulate_key(earlier)
                await quiet(driver)
            screen, called = app.screen, []
            name = spec.action.partition("(")[0].rpartition(".")[2]
            owner = app if spec.action.startswith("app.") else screen
            action = getattr(owner, f"action_{name}")

            def recorded(*words):
                called.append(words)
                return action(*words)

            monkeypatch.setattr(owner, f"action_{name}", recorded)
            before = app.export_screenshot()
            app.simulate_key(key)
            await quiet(driver)
            if not called:
                problems.append(f"{key} does not start {spec.id}")
            shows_here = app.screen is screen and spec.id != "quit" and spec.id not in UNCHANGED.get(kind, ())
            if shows_here and app.export_screenshot() == before:
                problems.append(f"{key} ({spec.id}) changes nothing and says nothing")

    async def check():
        for spec in SPECS[kind]:
            for key in spec.keys:
                await press(spec, key)

    asyncio.run(check())
    assert not problems
