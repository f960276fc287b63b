"""Debian's Chromium driven by Playwright; tests that need it are skipped where either is missing."""

import shutil
from contextlib import contextmanager

import pytest

EXECUTABLE = shutil.which("chromium") or shutil.which("chromium-browser")
LOOKS = [
    pytest.param(((390, "dark"), (1280, "light")), id="dark-phone"),
    pytest.param(((390, "light"), (1280, "dark")), id="light-phone", marks=pytest.mark.soak),
]
"""(width, color scheme) of a page, which has one after the other: `make test` draws each width and each scheme."""


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


def look_of(width, scheme):
    """What `page_of` takes to open a page that looks like this, on which axe-core may run."""
    return {"viewport": {"width": width, "height": 800}, "color_scheme": scheme, "bypass_csp": True}


def check_looks(page, looks):
    """A page that has the first of these looks is accessible and not too wide in each of them."""
    for width, scheme in looks:
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        check_accessibility(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def check_accessibility(page):
    """Run axe-core, where the package that brings it is installed."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    result = axe.Axe().run(page, options={"resultTypes": ["violations"]})  # all else would be listed too, half its time
    assert result.violations_count == 0, result.generate_report()
