"""Draw the pictures of the documentation: `make pictures`. Needs Chromium and the package playwright.

A model and a conversion of it with a bug are run once; the report and the web page are photographed as users see them.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
IMAGES = DOCS / "images"
EXAMPLE = DOCS.parent / "examples" / "07_conversion.py"
SIZE = {"width": 1100, "height": 900}
COMMITS = ("3f2a9c1", "8d41be0", "c07e655", "e9b3d12", "51f80aa", "b6c4e7d")
JOB = """
import time
import torch
from tapscope import Dumper
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
dumper = Dumper(model, "job", rules=["*:in*=off"], control="127.0.0.1:0").open()
print("recording", flush=True)
with torch.no_grad():
    while True:
        with dumper.step(phase="decode"):
            model(torch.randn(2, 64))
        time.sleep(0.1)
"""
"""A job that is recorded while it is photographed."""
HISTORY = """
import sys
from tapscope.cli import main
for i, commit in enumerate(3 * sys.argv[1:]):
    options = ["--batch-size", "4", "--input-len", "32", "--output-len", "32", "--metadata", f"commit={commit}"]
    main(["bench", "latency", "model", "-o", f"bench/{i}.json", *options])
"""
"""Three benchmark results of each commit; commits by name only: the code is the same."""


def main() -> int:
    """Write every picture and return the exit code."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        print("make pictures needs chromium", file=sys.stderr)
        return 1
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with _started(root, sys.executable, "-c", JOB):
            _capture(root)
            web = (*_tapscope(), "web", ".", "--benchmarks", "bench", "--control", "job")
            with _started(root, *web) as link:
                _draw(chromium, root, link)
    return 0


@contextlib.contextmanager
def _started(root: Path, *command: str) -> Iterator[str]:
    """Context manager: run a command and yield the first line that it prints."""
    environment = {**os.environ, "TAPSCOPE_WEB_PASSWORD": "of the login page"}
    process = subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        first = process.stdout.readline().strip()
        if not first:
            raise RuntimeError(f"ended without a line: {' '.join(command[1:4])}")
        yield first
    finally:
        process.terminate()
        process.wait()


def _tapscope() -> list[str]:
    return [sys.executable, "-m", "tapscope"]


def _capture(root: Path) -> None:
    subprocess.run([sys.executable, EXAMPLE, "model", "changed"], cwd=root, check=True, stdout=subprocess.DEVNULL)
    prompt = ("--prompt", "import os", "--max-new-tokens", "24")
    for model, run, tokens in (("model", "base", prompt), ("changed", "target", ("--tokens-from", "base"))):
        command = [*_tapscope(), "dump", model, "-o", run, *tokens]
        subprocess.run(command, cwd=root, check=True, stdout=subprocess.DEVNULL)
    (root / "bench").mkdir()
    command = [sys.executable, "-c", HISTORY, *COMMITS]
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
    """Draw one picture with thumbnails of all screens, and one of all pages."""
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
