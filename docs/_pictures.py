"""Draw the pictures of the documentation: `make pictures`. Needs Chromium and the package playwright.

A model and a conversion of it with a bug are run once; the report and the web page are photographed as users see them.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
IMAGES = DOCS / "images"
EXAMPLE = DOCS.parent / "examples" / "07_conversion.py"
SIZE = {"width": 1100, "height": 900}


def main() -> int:
    """Write every picture; returns the exit code."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        print("make pictures needs chromium", file=sys.stderr)
        return 1
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _capture(root)
        server = subprocess.Popen([*_tapscope(), "web", "."], cwd=root, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            _draw(chromium, root, server.stdout.readline().strip())
        finally:
            server.terminate()
            server.wait()
    return 0


def _tapscope() -> list[str]:
    return [sys.executable, "-m", "tapscope"]


def _capture(root: Path) -> None:
    subprocess.run([sys.executable, EXAMPLE, "model", "changed"], cwd=root, check=True, stdout=subprocess.DEVNULL)
    prompt = ("--prompt", "import os", "--max-new-tokens", "24")
    for model, run, tokens in (("model", "base", prompt), ("changed", "target", ("--tokens-from", "base"))):
        command = [*_tapscope(), "dump", model, "-o", run, *tokens]
        subprocess.run(command, cwd=root, check=True, stdout=subprocess.DEVNULL)
    command = [*_tapscope(), "diff", "base", "target", "--html", "diff.html"]
    subprocess.run(command, cwd=root, check=False, stdout=subprocess.DEVNULL)


def _draw(chromium: str, root: Path, link: str) -> None:
    from _screens import terminal_sheet
    from playwright.sync_api import sync_playwright

    screens = terminal_sheet(root)  # before Playwright, which has an event loop of its own
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto((root / "diff.html").as_uri())
        page.wait_for_selector("canvas")
        page.screenshot(path=IMAGES / "report.png")
        page = browser.new_page(viewport=SIZE, color_scheme="dark")
        page.goto(link)
        page.select_option("select[name=baseline]", label="base")
        page.select_option("select[name=target]", label="target")
        page.click("text=Diff")
        page.wait_for_selector("article.cause")
        page.screenshot(path=IMAGES / "web-diff.png")
        _draw_sheets(browser, root, page, screens)
        browser.close()


def _draw_sheets(browser: Any, root: Path, page: Any, screens: str) -> None:
    """One picture of all screens and one of all pages, in small."""
    from _screens import page_sheet

    origin, state = "/".join(page.url.split("/")[:3]), page.context.storage_state()
    for name, text in (
        ("screens", screens),
        ("pages", page_sheet(browser, root, origin, state)),
    ):
        file = root / f"{name}.html"
        file.write_text(text, encoding="utf-8")
        sheet = browser.new_page(viewport={"width": 1100, "height": 800})
        sheet.goto(file.as_uri())
        sheet.screenshot(path=IMAGES / f"{name}.jpg", full_page=True, type="jpeg", quality=60)


if __name__ == "__main__":
    sys.exit(main())
