"""Pilots wait for 2 ms without work in place of Textual's 20: a key press then costs its work, hardly any sleep."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest

from tapscope.dashboard.screens import browse_base, diff_base


@pytest.fixture(autouse=True, scope="session")
def _short_pauses() -> Iterator[None]:
    with patch.multiple("textual._wait", SLEEP_GRANULARITY=0.002, SLEEP_IDLE=0.0001):
        yield


@pytest.fixture
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are read at once, not after the cursor has rested."""
    for module in (browse_base, diff_base):
        monkeypatch.setattr(module, "REST_S", 0)
