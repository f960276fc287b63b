"""Contact sheets of the dashboard: twelve terminal screens in three sizes and four color schemes, and ten web pages."""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

SIZES = {"80 × 24": (80, 24), "120 × 40": (120, 40), "200 × 60": (200, 60)}
SCREENS: dict[str, tuple[str, tuple[str, ...]]] = {
    "two runs: the culprit": ("pair", ()),
    "findings of everything": ("pair", ("d", "v")),
    "heat map by token": ("pair", ("a",)),
    "values of both sides": ("pair", ("c",)),
    "the whole tensor": ("pair", ("c", "m")),
    "module graph": ("pair", ("T",)),
    "one run": ("run", ()),
    "heat map of one run": ("run", ("m",)),
    "histogram": ("run", ("v",)),
    "a site over steps": ("run", ("v", "v", "v")),
    "live": ("run", ("L",)),
    "help": ("run", ("question_mark",)),
}
"""Name -> runs, and the keys that lead to the screen."""
COLOURS = {
    "dark": ("dark", False),
    "light": ("light", False),
    "16 colours": ("ansi", False),
    "NO_COLOR": ("dark", True),
}
WIDTHS = {"desktop, light": (1280, "light"), "phone, dark": (390, "dark")}
HEIGHT = 800
"""Of the window; a page that is shorter is cut at its end."""


def terminal_sheet(root: Path) -> str:
    """Return the HTML sheet of the terminal screens of ``root/base`` and ``root/target``."""
    rows = [
        (name, [_screen(root, runs, keys, size) for size in SIZES.values()]) for name, (runs, keys) in SCREENS.items()
    ]
    coloured = [
        _screen(root, "pair", (), SIZES["120 × 40"], theme, no_color=no_color) for theme, no_color in COLOURS.values()
    ]
    sheet = _table(SIZES, [(name, [_picture(svg) for svg in svgs]) for name, svgs in rows])
    return _page(sheet + _table(COLOURS, [("", [_picture(svg) for svg in coloured])]))


def page_sheet(browser: Any, root: Path, origin: str, state: Any) -> str:
    """Return the HTML sheet of the web pages at both widths; ``state`` holds the cookies of a session."""
    request = browser.new_context(storage_state=state).request
    runs = {run["name"]: run["id"] for run in request.get(f"{origin}/api/runs").json()["runs"]}
    site = {"run": runs["base"], "site": "model.layers.2.mlp.gate_proj:out", "step": 0}
    diff = f"/diff/?{urlencode({'baseline': runs['base'], 'target': runs['target']})}"
    pages = {
        "login": ("/login", "input[name=password]", HEIGHT),
        "runs": ("/", "table", HEIGHT),
        "run": (f"/run/{runs['base']}", "canvas", 640),
        "tensor": (f"/tensor/?{urlencode(site)}", "table.tile", 700),
        "diff": (diff, "article", HEIGHT),
        "a layer opened": (diff, "article", 400),
        "module graph": (diff, "article", HEIGHT),
        "live": (f"/live/{runs['job']}", ".charts canvas", 740),
        "capture": ("/control/", "textarea", HEIGHT),
        "benchmark history": ("/benchmarks/", ".charts canvas", 740),
    }  # name -> address, what shows that it is there, and how much of it is drawn
    rows = []
    for name, (address, ready, height) in pages.items():
        shots = []
        for width, scheme in WIDTHS.values():
            session = None if name == "login" else state
            page = browser.new_page(
                viewport={"width": width, "height": HEIGHT}, color_scheme=scheme, storage_state=session
            )
            page.goto(origin + address)
            page.wait_for_selector(ready)
            _go_to(page, name)
            shot = root / f"{name}-{width}.png"
            used = page.evaluate("Math.ceil(document.body.getBoundingClientRect().height)")
            page.screenshot(path=shot, clip={"x": 0, "y": 0, "width": width, "height": min(used, height)})
            page.close()
            shots.append(f'<img src="{shot.as_uri()}">')
        rows.append((name, shots))
    return _page(_table(WIDTHS, rows, [width for width, _ in WIDTHS.values()]))


def _go_to(page: Any, name: str) -> None:
    """Navigate the page to the state that its picture shows."""
    if name == "a layer opened":
        page.click("canvas", position={"x": 300, "y": 127})  # layer 2, which holds the cause
        page.wait_for_selector("nav.trail")
        page.click("text=Zoom in")
        page.locator("nav.trail").evaluate("each => each.scrollIntoView()")
    if name == "module graph":
        page.click("summary")
        page.wait_for_selector("#module-graph tr.producer")
        page.locator("#module-graph tr.producer").first.evaluate("each => each.scrollIntoView({block: 'center'})")
        page.locator("section[aria-label=Modules]").evaluate("each => each.scrollIntoView()")
    if name == "live":
        page.wait_for_selector("dt:text-is('records/s') + dd:not(:text-is('0'))")
    if name == "capture":
        page.click("button:text-is('On')")
        page.wait_for_selector("[role=status]:not(:empty)")


def _screen(
    root: Path, runs: str, keys: Sequence[str], size: tuple[int, int], theme: str = "dark", *, no_color: bool = False
) -> str:
    """Return the screen as SVG."""
    from tapscope.comparator import CompareOptions
    from tapscope.dashboard.app import TapscopeApp
    from tapscope.dashboard.browse_source import RunSource
    from tapscope.dashboard.diff_source import DiffSource

    def open_pair(way: Any, progress: Any, *_: Any) -> DiffSource:
        return DiffSource.open((Path("base"), Path("target")), way.of(CompareOptions()), progress)

    async def draw() -> str:
        if runs == "pair":
            app = TapscopeApp(open_diff=(open_pair, "base → target"), theme=theme)
        else:
            app = TapscopeApp(lambda: RunSource.open(root / "base"), theme=theme)
        async with app.run_test(size=size) as pilot:
            for key in (None, *keys):
                if key is not None:
                    await pilot.press(key)
                for _ in range(600):
                    await pilot.pause(0.01)
                    if app.screen_stack[1].settled and getattr(app.screen, "settled", True):
                        break
            await pilot.pause()
            return app.export_screenshot()

    os.environ.pop("NO_COLOR", None)
    if no_color:
        os.environ["NO_COLOR"] = "1"
    try:
        with contextlib.chdir(root):  # commands on the screen name no path of this machine
            return asyncio.run(draw())
    finally:
        os.environ.pop("NO_COLOR", None)


def _picture(svg: str) -> str:
    return f'<img src="data:image/svg+xml,{quote(svg)}">'


def _table(
    heads: Sequence[str] | dict[str, Any], rows: Sequence[tuple[str, list[str]]], widths: Sequence[int] = ()
) -> str:
    """Return an HTML table; ``widths`` are the relative column widths, equal if empty."""
    shares = [f"{93 * width / sum(widths):.1f}%" for width in widths] or ["auto"] * len(heads)
    columns = zip(("", *heads), ("7%", *shares), strict=True)
    head = "".join(f'<th style="width:{share}">{escape(name)}' for name, share in columns)
    body = "".join(f"<tr><th>{escape(name)}" + "".join(f"<td>{each}" for each in cells) for name, cells in rows)
    return f"<table><tr>{head}{body}</table>"


def _page(body: str) -> str:
    style = (
        "body{font:14px sans-serif;margin:8px} img{width:100%} td{vertical-align:top} "
        "table{width:100%;table-layout:fixed}"
    )
    return f"<!doctype html><meta charset=utf-8><style>{style}</style>{body}"
