"""The HTML report: one file that needs no network and no server."""

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tapscope.comparator import Comparison, Finding
from tapscope.core.errors import TapscopeError
from tapscope.core.formatting import json_line
from tapscope.dashboard.model.diff import DiffView, diff_view, worst_findings
from tapscope.dashboard.model.finding import FindingView
from tapscope.dashboard.model.finding_grid import EqualSteps, site_grid
from tapscope.dashboard.model.grid import Grid, layer_grid
from tapscope.dashboard.model.grid_levels import module_grid
from tapscope.dashboard.model.place_grid import place_grids
from tapscope.dashboard.model.record import RecordView
from tapscope.dashboard.model.schema import escaped
from tapscope.dashboard.model.tensor import PairView, pair_view
from tapscope.run_format.run import Run

HERE = Path(__file__).resolve().parents[1]
STATIC = HERE / "static"
MAX_CELLS = 120_000
"""Cells of the heat map of sites; where there are more, steps are joined by maximum."""
MAX_MODULE_CELLS = 20_000
"""The same of the modules."""
MAX_SITES = 1_000
MAX_PLACES = 200
"""Columns of the heat maps by rank and token."""
MAX_TENSORS = 6
"""Tensors whose values are shown."""
TILE_ROWS, TILE_COLUMNS = 5, 12
_IMPORT = re.compile(r'^import (\{.*\}) from "\./([\w./-]+)";$\n?', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=class|(?:async )?function|const)|^export \{.*\};$", re.MULTILINE)
_VENDORED_EXPORT = re.compile(r"export\{([^}]*)\};?")


@dataclass(frozen=True, slots=True)
class TensorSection:
    """One of the worst tensors."""

    site: str
    facts: str
    link: str
    worst: str
    columns: tuple[int, ...]
    pair: PairView


def html_report(
    comparison: Comparison,
    runs: tuple[Run, Run],
    *,
    equal_steps: EqualSteps = lambda finding: (),
    made: str = "",
    num_tensors: int = MAX_TENSORS,
) -> str:
    """The whole page; ``made`` is when, in words. Tensors that can no longer be read are left out."""
    report = comparison.report
    grid = site_grid(report.findings, equal_steps)
    view = diff_view(report, runs, max_findings=MAX_SITES, grid=grid)
    tensors = [
        section
        for finding in _worst_tensors(report.findings, num_tensors)
        if (section := _tensor(comparison, finding, view)) is not None
    ]
    return render(view, grid, tensors, made, _places(comparison))


def render(
    view: DiffView,
    grid: Grid,
    tensors: Sequence[TensorSection] = (),
    made: str = "",
    places: Sequence[Grid] = (),
) -> str:
    """The page of a view, with the heat map of all its sites, and of its layers at ``places``."""
    view = escaped(_ranked(view))
    orders = sorted(finding.order for finding in view.findings)
    sites, joined = _fitted(grid.selected(orders))
    data = {"layers": escaped(layer_grid(grid).binned(1000).packed())}
    modules = module_grid(grid)
    if len(modules.rows) < min(len(grid.rows), MAX_SITES):  # else they are the sites once more
        data["modules"] = escaped(modules.binned(max(MAX_MODULE_CELLS // len(modules.rows), 1)).packed())
    data["sites"] = escaped(sites.packed())
    data |= {f"{each.axis}s": escaped(layer_grid(each).binned(MAX_PLACES).packed()) for each in places}
    script = bundled("report.js")
    return (
        environment()
        .get_template("diff.html.j2")
        .render(
            view=view,
            sites={finding.order: finding for finding in view.findings},
            tensors=[escaped(each) for each in tensors],
            joined=joined,
            levels=list(data),
            made=made,
            style=Markup((STATIC / "style.css").read_text()),
            script=Markup(script),
            csp=content_policy(script),
            data=embedded({name: msgspec.to_builtins(each) for name, each in data.items()}),
            dtypes=_dtypes,
        )
    )


def show_report(view: RecordView) -> str:
    """One tensor as a page without a script."""
    page = environment().get_template("show.html.j2")
    return page.render(view=escaped(view), style=Markup((STATIC / "style.css").read_text()), csp=content_policy(""))


@lru_cache(maxsize=1)
def environment() -> Environment:
    """Templates with autoescape for every name."""
    return Environment(loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined)


def embedded(data: dict[str, Any]) -> Markup:
    """JSON within a script element: no character of it can end the element or begin a comment."""
    text = json_line(data)
    return Markup(text.translate({ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}))


def content_policy(script: str) -> str:
    """Content-Security-Policy of a file: nothing is loaded, and only this script runs."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rest = "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src 'sha256-{digest}'; {rest}"


def bundled(name: str) -> str:
    """A module with the modules that it imports in front of it, each once, as one script.

    A vendored module becomes a function, for its names are those of a minifier; what it exports, that function returns.
    """
    parts: dict[str, str] = {}

    def add(module: str) -> None:
        if module in parts:
            return
        text = (STATIC / module).read_text()
        for names, each in _IMPORT.findall(text):
            if each.startswith("vendor/"):
                parts[each] = f"const {names.replace(' as ', ': ')} = {_as_function((STATIC / each).read_text())};"
            else:
                add(each)
        parts[module] = _EXPORT.sub("", _IMPORT.sub("", text))

    add(name)
    return "\n".join(parts.values())


def _as_function(module: str) -> str:
    """Calls a function with the text of a module, which returns its exports."""

    def returned(match: re.Match[str]) -> str:
        pairs = (each.strip().split(" as ") for each in match[1].split(","))
        return f"return {{{', '.join(f'{name}: {own}' for own, name in pairs)}}};"

    return f"(() => {{\n{_VENDORED_EXPORT.sub(returned, module)}\n}})()"


def _places(comparison: Comparison) -> tuple[Grid, ...]:
    """The heat maps by rank and token; none where values can no longer be read."""
    try:
        return place_grids(comparison).shown
    except TapscopeError:
        return ()


def _ranked(view: DiffView) -> DiffView:
    """Causes first, then what follows from them, then everything else; each in execution order."""
    rank = {"producer": 0, "downstream": 2}
    findings = sorted(view.findings, key=lambda f: (rank.get(f.role, 1) if f.is_bad else 3, f.order))
    return replace(view, findings=tuple(findings))


def _fitted(grid: Grid) -> tuple[Grid, str]:
    """A grid of at most MAX_CELLS cells, and a sentence where steps were joined."""
    columns = len(grid.columns)
    fitting = max(MAX_CELLS // max(len(grid.rows), 1), 1)
    if columns <= fitting:
        return grid, ""
    return grid.binned(fitting), f"{columns:,} steps joined into {fitting} by their maximum in the map of sites"


def _worst_tensors(findings: Sequence[Finding], num: int) -> list[Finding]:
    """Producers first, then the largest errors ÷ floor."""
    bad = [f for f in findings if f.verdict.is_bad and f.basis == "values"]
    kept = worst_findings(bad, num)
    return sorted(kept, key=lambda f: (f.role != "producer", f.order))


def _tensor(comparison: Comparison, finding: Finding, view: DiffView) -> TensorSection | None:
    try:
        reader = comparison.reader(finding)
        pair = None if reader is None else pair_view(finding.order, reader, TILE_ROWS, TILE_COLUMNS)
    except TapscopeError:
        return None
    if pair is None:
        return None
    shown = next((each for each in view.findings if each.order == finding.order), None)
    if shown is None:
        return None
    facts = f"{shown.ratio.text} × floor · max |Δ| {shown.max_abs.text} · rel l2 {shown.rel_l2.text}"
    facts += f" · cosine {shown.cosine.text}"
    width = len(pair.tile.rows[0].baseline) if pair.tile.rows else 0
    columns = tuple(range(pair.tile.first_column, pair.tile.first_column + width))
    return TensorSection(shown.site, facts, shown.link, shown.where, columns, pair)


def _dtypes(finding: FindingView) -> str:
    dtypes = [side.dtype for side in (finding.baseline, finding.target) if side]
    return " → ".join(dict.fromkeys(dtypes))
