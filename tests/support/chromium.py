"""Debian's Chromium driven by Playwright; tests that need it are skipped where either is missing."""

import shutil
from contextlib import contextmanager
from itertools import product

import pytest
from soak_cases import mostly_soak

EXECUTABLE = shutil.which("chromium") or shutil.which("chromium-browser")
LOOKS = mostly_soak(product([390, 1280], ["light", "dark"]), default=[(390, "dark"), (1280, "light")])
"""(width, color scheme) of a page: `make test` draws each width and each scheme, `make soak` the other pairs."""


@contextmanager
def browser():
    """A headless browser; skips the test without one."""
    playwright = pytest.importorskip("playwright.sync_api")
    if EXECUTABLE is None:
        pytest.skip("no chromium on this machine")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=EXECUTABLE, args=["--no-sandbox"])
        try:
            yield started
        finally:
            started.close()


@contextmanager
def page_of(started, url, **context):
    """A page that fails the test for an error on its console, or a request to another origin."""
    problems, requests = [], []
    opened = started.new_context(**context)
    page = opened.new_page()
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(url)
    yield page
    opened.close()
    origin = url if url.startswith("file:") else "/".join(url.split("/")[:3])
    assert not problems, problems
    assert [each for each in requests if not each.startswith((origin, "data:"))] == []


def check_accessibility(page):
    """Run axe-core, where the package that brings it is installed."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    result = axe.Axe().run(page)
    assert result.violations_count == 0, result.generate_report()
