"""Debian's Chromium driven by Playwright; tests that need them are skipped if either is missing."""

import shutil
from contextlib import contextmanager

import pytest

EXECUTABLE = shutil.which("chromium") or shutil.which("chromium-browser")
LOOKS = [
    pytest.param(((390, "dark"), (1280, "light")), id="dark-phone"),
    pytest.param(((390, "light"), (1280, "dark")), id="light-phone", marks=pytest.mark.soak),
]
"""(width, color scheme) pairs that a page takes in turn: `make test` covers each width and each scheme."""


@contextmanager
def browser():
    """Yield a headless browser; skips the test if there is none."""
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
    """Yield a page that fails the test on a console error or a request to another origin."""
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
    """Return the arguments of `page_of` for this look, on which axe-core may run."""
    return {"viewport": {"width": width, "height": 800}, "color_scheme": scheme, "bypass_csp": True}


def check_looks(page, looks):
    """Check that a page is accessible and not too wide in each look; it is opened in the first one."""
    for width, scheme in looks:
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        check_accessibility(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def check_accessibility(page):
    """Run axe-core; skips the test if its package is not installed."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    result = axe.Axe().run(page, options={"resultTypes": ["violations"]})  # listing other results takes half the time
    assert result.violations_count == 0, result.generate_report()
