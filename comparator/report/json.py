"""JSON lines: one object a line, each with ``type`` and ``schema``; the first is the header, the last the summary.

Numbers that are not finite are null, and ``nonfinite`` of the line says which they are: ``{"ratio": "inf"}``.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tapscope.comparator.coverage import Coverage
from tapscope.comparator.explain.explanation import Explanation
from tapscope.comparator.finding import Finding, Place, Verdict
from tapscope.comparator.localise import Divergence
from tapscope.ledger import Ledger

if TYPE_CHECKING:
    from tapscope.comparator.compare import Report

SCHEMA = 1
"""Goes up when a field changes its meaning or goes away; new fields may come at any time."""


def lines(report: "Report") -> Iterator[dict[str, Any]]:
    """Header, findings in execution order, summary; see docs/comparator.md for every field."""
    yield _line("header", baseline=report.baseline, target=report.target, options=_options(report))
    for finding in report.findings:
        yield _line("finding", **_members(finding))
    yield _line("summary", **_summary(report))


def _line(kind: str, **content: Any) -> dict[str, Any]:
    odd: dict[str, str] = {}
    line = {"type": kind, "schema": SCHEMA, **{name: _plain(value, name, odd) for name, value in content.items()}}
    return {**line, "nonfinite": odd}


def _plain(value: Any, path: str, odd: dict[str, str]) -> Any:
    """``value`` as JSON has it; what is not finite is null and goes to ``odd``."""
    kind = type(value)
    if value is None or kind in (str, int, bool):
        return value
    if isinstance(value, np.generic):
        return _plain(value.item(), path, odd)
    if kind is float:
        if math.isfinite(value):
            return value
        odd[path] = str(value)
        return None
    if isinstance(value, tuple | list):
        return [_plain(item, f"{path}.{i}", odd) for i, item in enumerate(value)]
    if isinstance(value, frozenset):
        return sorted(value)
    members = value if isinstance(value, Mapping) else _members(value) if is_dataclass(value) else None
    if members is None:
        return str(value)
    return {str(name): _plain(item, f"{path}.{name}", odd) for name, item in members.items()}


def _members(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, and what a reader would otherwise have to work out."""
    found = {name: getattr(value, name) for name in value.__dataclass_fields__}
    if isinstance(value, Finding):
        return {**found, "ratio": value.ratio}
    if isinstance(value, Place):
        return {**found, "text": value.text()}
    if isinstance(value, Explanation):
        return {**found, "text": value.text}
    if isinstance(value, Ledger):
        return {**found, "lost": value.lost, "complete": value.complete}
    if isinstance(value, Coverage):
        baseline, target = found.pop("ledgers")
        return {**found, "ledger_baseline": baseline, "ledger_target": target}
    if isinstance(value, Divergence):
        finding = found.pop("finding")
        return {**found, "ratio": finding.ratio}
    return found


def _options(report: "Report") -> dict[str, Any]:
    return _members(report.options) | {
        "mapping": report.options.mapping.files,
        "floor": None if report.options.floor is None else str(report.options.floor),
        "rules": [f"{rule.site}={rule.require}" for rule in report.options.rules],
    }


def _summary(report: "Report") -> dict[str, Any]:
    closest = report.closest_call
    return {
        "exit_code": report.exit_code,
        "counts": {str(v): sum(f.verdict is v for f in report.findings) for v in Verdict},
        "first_divergence": report.first_divergence,
        "divergences": report.divergences,
        "closest_call": closest and {"site": closest.site, "ratio": closest.ratio, "test": closest.test},
        "coverage": report.coverage,
    }
