"""Drafting always pays in these tests, so that drafts do not depend on the clock or the load of the machine."""

import pytest

from tapscope.engine.speculative.speculator import Speculator


@pytest.fixture(autouse=True)
def no_measured_times(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.path.stem != "test_draft_cost":
        monkeypatch.setattr(Speculator, "record_time", lambda self, plan, seconds: None)
