"""JSON lines: one object per line, each with ``type`` and ``schema``; the header comes first, the summary last.

Non-finite numbers are null, and the line's ``nonfinite`` field has their values: ``{"ratio": "inf"}``.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict

from tapscope.comparator.facts import Place
from tapscope.comparator.report.json_schemas import SCHEMAS, SUMMARY, in_schema_1, test_in_schema_1
from tapscope.comparator.verdict.coverage import Coverage
from tapscope.comparator.verdict.explanation import Explanation
from tapscope.comparator.verdict.finding import MEMBERS, Finding, Verdict
from tapscope.comparator.verdict.localise import Divergence
from tapscope.run_format.ledger import Ledger

if TYPE_CHECKING:
    from tapscope.comparator.report.report import Report

_AS_IT_IS = frozenset((str, int, bool, type(None)))
_WITH_PROPERTIES = (Place, Explanation, Ledger, Coverage, Divergence)
"""Classes with additional fields, see :func:`_members`."""
SCHEMA = 2
"""Incremented when a field is removed or changes its meaning; new fields may be added at any time."""


def lines(report: "Report", schema: int = SCHEMA) -> Iterator[dict[str, Any]]:
    """Yield the header, the findings in execution order, and the summary; docs/reference/json.md documents every field.

    ``schema`` 1 uses the deprecated names of :mod:`.json_schemas`.
    """
    writer = _Writer(schema)
    options = _options(report, schema)
    yield writer.line("header", baseline=report.baseline, target=report.target, options=options)
    for finding in report.findings:
        yield writer.line("finding", **writer.members(finding))
    yield writer.line("summary", **_summary(report, schema))


class _Writer:
    """Converts the values of a report to JSON lines of one schema version."""

    def __init__(self, schema: int) -> None:
        self._schema = schema

    def line(self, kind: str, **content: Any) -> dict[str, Any]:
        """Return one line; non-finite numbers are null and listed in ``nonfinite``."""
        odd: list[float] = []
        values = {name: self._plain(value, odd) for name, value in content.items()}
        line = {"type": kind, "schema": SCHEMAS[self._schema], **values}
        nonfinite: dict[str, str] = {}
        return {**(_nulled(line, "", nonfinite) if odd else line), "nonfinite": nonfinite}

    def members(self, value: Any) -> dict[str, Any]:
        """Return the fields of a struct or dataclass, and derived values that readers would otherwise have to
        compute."""
        members = _members(value)
        return in_schema_1(type(value), members) if self._schema == 1 else members

    def _plain(self, value: Any, odd: list[float]) -> Any:
        """Return ``value`` as JSON types; non-finite numbers are kept and appended to ``odd``."""
        kind = type(value)
        if kind in _AS_IT_IS:
            return value
        if kind is float:
            if not math.isfinite(value):
                odd.append(value)
            return value
        if kind is tuple or kind is list:
            return [self._plain(item, odd) for item in value] if value else []
        members = self.members(value) if _fields(kind) else value
        if isinstance(value, np.generic):
            return self._plain(value.item(), odd)
        if isinstance(value, frozenset):
            return sorted(value)
        if not isinstance(members, Mapping):
            return str(value)
        return {str(name): self._plain(item, odd) for name, item in members.items()}


def _nulled(value: Any, path: str, nonfinite: dict[str, str]) -> Any:
    """Return ``value`` with null for non-finite numbers, and add these to ``nonfinite`` by path."""
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite[path] = str(value)
        return None
    if isinstance(value, list):
        return [_nulled(item, f"{path}.{i}".lstrip("."), nonfinite) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {name: _nulled(item, f"{path}.{name}".lstrip("."), nonfinite) for name, item in value.items()}
    return value


def _fields(kind: type) -> Iterable[str]:
    """Return the names of the fields of a struct or dataclass; empty for any other class."""
    names: Iterable[str] = getattr(kind, "__struct_fields__", ()) or getattr(kind, "__dataclass_fields__", ())
    return names


def _members(value: Any) -> dict[str, Any]:
    """Return the fields, and derived values that readers would otherwise have to compute."""
    if isinstance(value, Finding):
        return {**{name: getattr(value, name) for name in MEMBERS}, "ratio": value.ratio}
    names = () if isinstance(value, Struct) else _fields(type(value))
    members = {name: getattr(value, name) for name in names} if names else asdict(value)
    if not isinstance(value, _WITH_PROPERTIES):
        return members
    if isinstance(value, Place):
        return {**members, "text": value.text()}
    if isinstance(value, Explanation):
        return {**members, "text": value.text}
    if isinstance(value, Ledger):
        return {**members, "lost": value.lost, "complete": value.complete}
    if isinstance(value, Coverage):
        baseline, target = members.pop("ledgers")
        return {**members, "ledger_baseline": baseline, "ledger_target": target}
    if isinstance(value, Divergence):
        finding = members.pop("finding")
        return {**members, "ratio": finding.ratio}
    return members


def _options(report: "Report", schema: int) -> dict[str, Any]:
    run = None if report.options.noise_run is None else str(report.options.noise_run)
    members = _members(report.options) | {
        "mapping": report.options.mapping.files,
        "noise_run": run,
        "floor": run,
        "rules": [f"{rule.site}={rule.require}" for rule in report.options.rules],
    }
    # The report does not depend on which processes measure.
    for name in ("jobs", "ray", *(("noise_run", "fail_on") if schema == 1 else ("floor",))):
        del members[name]
    return members


def _summary(report: "Report", schema: int) -> dict[str, Any]:
    closest = report.max_ratio_finding
    test = closest and (test_in_schema_1(closest.test) if schema == 1 else closest.test)
    members = {
        "exit_code": report.exit_code,
        "failed": sorted(report.failed),
        "num_findings": {str(v): sum(f.verdict is v for f in report.findings) for v in Verdict},
        "first_divergence": report.first_divergence,
        "divergences": report.divergences,
        "max_ratio": closest and {"site": closest.site, "ratio": closest.ratio, "test": test},
        "coverage": report.coverage,
    }
    if schema == 1:
        del members["failed"]
        return {SUMMARY.get(name, name): value for name, value in members.items()}
    return members
