"""Self-contained HTML report of a comparison: one file that needs no network and no server."""

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
"""Maximum number of cells in the heat map of sites; steps are merged by maximum if there are more."""
MAX_MODULE_CELLS = 20_000
"""Maximum number of cells in the heat map of modules."""
MAX_SITES = 1_000
MAX_PLACES = 200
"""Maximum number of columns in the heat maps by rank and token."""
MAX_TENSORS = 6
"""Maximum number of tensors whose values are shown."""
TILE_ROWS, TILE_COLUMNS = 5, 12
_IMPORT = re.compile(r'^import (\{.*\}) from "\./([\w./-]+)";$\n?', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=class|(?:async )?function|const)|^export \{.*\};$", re.MULTILINE)
_VENDORED_EXPORT = re.compile(r"export\{([^}]*)\};?")


@dataclass(frozen=True, slots=True)
class TensorSection:
    """Section of the page with the values of one of the worst tensors."""

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
    """Render the page of a comparison; ``made`` is its creation time as text.

    Tensors whose values can no longer be read are left out.
    """
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
    """Render the page of a view, with heat maps of its sites by step, and of its layers by each axis of ``places``."""
    view = escaped(_ranked(view))
    orders = sorted(finding.order for finding in view.findings)
    sites, joined = _fitted(grid.selected(orders))
    data = {"layers": escaped(layer_grid(grid).binned(1000).packed())}
    modules = module_grid(grid)
    if len(modules.rows) < min(len(grid.rows), MAX_SITES):  # otherwise they would repeat the sites
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
    """Render the page of one tensor, without a script."""
    page = environment().get_template("show.html.j2")
    return page.render(view=escaped(view), style=Markup((STATIC / "style.css").read_text()), csp=content_policy(""))


@lru_cache(maxsize=1)
def environment() -> Environment:
    """Return the Jinja2 environment, with autoescape for every template."""
    return Environment(loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined)


def embedded(data: dict[str, Any]) -> Markup:
    """Encode JSON for a script element: escaped so that the content cannot end the element or start a comment."""
    text = json_line(data)
    return Markup(text.translate({ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}))


def content_policy(script: str) -> str:
    """Return the Content-Security-Policy of a self-contained file: no loading, and no script other than this one."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rest = "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src 'sha256-{digest}'; {rest}"


def bundled(name: str) -> str:
    """Concatenate a JavaScript module and its imports, each once and before its importers, to one script.

    A vendored module is wrapped in a function that returns its exports, because its minified names could collide.
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
    """Wrap the source of a module in an immediately invoked function that returns the module's exports."""

    def returned(match: re.Match[str]) -> str:
        pairs = (each.strip().split(" as ") for each in match[1].split(","))
        return f"return {{{', '.join(f'{name}: {own}' for own, name in pairs)}}};"

    return f"(() => {{\n{_VENDORED_EXPORT.sub(returned, module)}\n}})()"


def _places(comparison: Comparison) -> tuple[Grid, ...]:
    """Return the heat maps by rank and token; empty if values can no longer be read."""
    try:
        return place_grids(comparison).shown
    except TapscopeError:
        return ()


def _ranked(view: DiffView) -> DiffView:
    """Sort findings: causes, other bad findings, downstream ones, then the rest; each group in execution order."""
    rank = {"producer": 0, "downstream": 2}
    findings = sorted(view.findings, key=lambda f: (rank.get(f.role, 1) if f.is_bad else 3, f.order))
    return replace(view, findings=tuple(findings))


def _fitted(grid: Grid) -> tuple[Grid, str]:
    """Bin steps so that the grid has at most MAX_CELLS cells; return the grid, and a sentence if steps were merged."""
    columns = len(grid.columns)
    fitting = max(MAX_CELLS // max(len(grid.rows), 1), 1)
    if columns <= fitting:
        return grid, ""
    return grid.binned(fitting), f"{columns:,} steps joined into {fitting} by their maximum in the map of sites"


def _worst_tensors(findings: Sequence[Finding], num: int) -> list[Finding]:
    """Return the ``num`` worst findings with compared values, producers first."""
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
