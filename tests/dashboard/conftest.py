"""Pilots wait for 2 ms without work in place of Textual's 20: a key press then costs its work, hardly any sleep. All
pages are opened by one Chromium."""

import asyncio
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from chromium import browser
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet

from tapscope.dashboard.screens import browse_base, diff_base


@pytest.fixture(autouse=True, scope="session")
def _short_pauses() -> Iterator[None]:
    with patch.multiple("textual._wait", SLEEP_GRANULARITY=0.002, SLEEP_IDLE=0.0001):
        yield


@pytest.fixture(autouse=True, scope="session")
def _styles_are_parsed_once() -> Iterator[None]:
    """Not by every app, 40 ms: rules depend on their text and on the variables alone, and apps only read them."""
    parse, parsed = Stylesheet._parse_rules, {}

    def parse_once(self: Stylesheet, *args: Any, **named: Any) -> list[RuleSet]:
        key = args, *named.items(), frozenset(self._variables.items())
        if key not in parsed:
            parsed[key] = parse(self, *args, **named)
        return parsed[key]

    with patch.object(Stylesheet, "_parse_rules", parse_once):
        yield


@pytest.fixture
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are read at once, not after the cursor has rested."""
    for module in (browse_base, diff_base):
        monkeypatch.setattr(module, "REST_S", 0)


@pytest.fixture(scope="session")
def _browser() -> Iterator[tuple[Any, asyncio.AbstractEventLoop]]:
    """With Playwright's event loop, which it leaves marked as running between its calls."""
    with browser() as started:
        loop = asyncio.get_running_loop()
        asyncio._set_running_loop(None)
        yield started, loop
        asyncio._set_running_loop(loop)


@pytest.fixture
def chromium(_browser: tuple[Any, asyncio.AbstractEventLoop]) -> Iterator[Any]:
    """A test with it can call no `asyncio.run`, others of the session can."""
    started, loop = _browser
    asyncio._set_running_loop(loop)
    yield started
    asyncio._set_running_loop(None)
