"""JSON lines: one object a line, each with ``type`` and ``schema``; the first is the header, the last the summary."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tapscope.comparator.coverage import Coverage
from tapscope.comparator.explain.explanation import Explanation
from tapscope.comparator.finding import Finding, Place, Verdict
from tapscope.comparator.localise import Divergence

if TYPE_CHECKING:
    from tapscope.comparator.compare import Report

SCHEMA = 1
"""Goes up when a field changes its meaning or goes away; new fields may come at any time."""


def lines(report: "Report") -> Iterator[dict[str, Any]]:
    """Header, findings in execution order, summary. Non-finite numbers are left to the writer."""
    yield _line("header", baseline=asdict(report.baseline), target=asdict(report.target), options=_options(report))
    for finding in report.findings:
        yield _finding(finding)
    yield _summary(report)


def _line(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "schema": SCHEMA, **fields}


def _options(report: "Report") -> dict[str, Any]:
    options = asdict(report.options) | {
        "mapping": report.options.mapping.files,
        "floor": None if report.options.floor is None else str(report.options.floor),
        "rules": [f"{rule.site}={rule.require}" for rule in report.options.rules],
    }
    return {
        k: sorted(v) if isinstance(v, frozenset) else list(v) if isinstance(v, tuple) else v for k, v in options.items()
    }


def _finding(finding: Finding) -> dict[str, Any]:
    members = _plain(finding) | {"verdict": str(finding.verdict), "worst": _place(finding.worst)}
    return _line("finding", **members, ratio=finding.ratio)


def _plain(value: Any) -> Any:
    """Objects as dicts of their fields, tuples as lists; ``asdict`` copies every leaf, five times as slowly."""
    names = getattr(value, "__dataclass_fields__", None)
    if names is not None:
        return {name: _plain(getattr(value, name)) for name in names}
    return list(map(_plain, value)) if isinstance(value, tuple) else value


def _place(place: Place | None) -> dict[str, Any] | None:
    return None if place is None else {**asdict(place), "index": list(place.index), "text": place.text()}


def _divergence(divergence: Divergence | None) -> dict[str, Any] | None:
    if divergence is None:
        return None
    return {
        "module": divergence.module,
        "site": divergence.site,
        "step": divergence.step,
        "place": _place(divergence.place),
        "inputs": divergence.inputs,
        "evidence": divergence.evidence,
        "others": list(divergence.others),
        "tokens": [{"place": _place(t.place), "error": t.error, "ratio": t.ratio} for t in divergence.tokens],
        "num_tokens": divergence.num_tokens,
        "is_certain": divergence.is_certain,
        "ratio": divergence.finding.ratio,
        "explanation": _explanation(divergence.explanation),
    }


def _explanation(explanation: Explanation | None) -> dict[str, Any] | None:
    if explanation is None:
        return None
    fields = asdict(explanation)
    return {**fields, "text": explanation.text, "tested": list(fields["tested"])}


def _coverage(coverage: Coverage) -> dict[str, Any]:
    fields = asdict(coverage)
    for name, ledger in zip(("baseline", "target"), coverage.ledgers, strict=True):
        fields[f"ledger_{name}"] = {**asdict(ledger), "lost": ledger.lost, "complete": ledger.complete}
    del fields["ledgers"]
    return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}


def _summary(report: "Report") -> dict[str, Any]:
    closest = report.closest_call
    return _line(
        "summary",
        exit_code=report.exit_code,
        counts={str(v): sum(f.verdict is v for f in report.findings) for v in Verdict},
        first_divergence=_divergence(report.first_divergence),
        divergences=[_divergence(d) for d in report.divergences],
        closest_call=None if closest is None else {"site": closest.site, "ratio": closest.ratio, "test": closest.test},
        coverage=_coverage(report.coverage),
    )
