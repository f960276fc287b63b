"""Fixtures of the dashboard tests: short waits of Textual's pilot, and one Chromium for all pages.

The pilot waits for 2 ms without work instead of Textual's 20 ms, so that a key press hardly sleeps.
"""

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
    """Cache parsed style sheets: parsing takes 40 ms per app. Rules depend on text and variables only."""
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
    """Read values immediately instead of after the cursor has rested."""
    for module in (browse_base, diff_base):
        monkeypatch.setattr(module, "REST_S", 0)


@pytest.fixture(scope="session")
def _browser() -> Iterator[tuple[Any, asyncio.AbstractEventLoop]]:
    """Start Chromium; yield the browser and Playwright's event loop, which stays marked as running between calls."""
    with browser() as started:
        loop = asyncio.get_running_loop()
        asyncio._set_running_loop(None)
        yield started, loop
        asyncio._set_running_loop(loop)


@pytest.fixture
def chromium(_browser: tuple[Any, asyncio.AbstractEventLoop]) -> Iterator[Any]:
    """Provide the browser. A test with this fixture cannot call `asyncio.run`; other tests of the session can."""
    started, loop = _browser
    asyncio._set_running_loop(loop)
    yield started
    asyncio._set_running_loop(None)
