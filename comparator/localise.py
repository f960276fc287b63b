"""Localise: which site adds an error that its inputs do not have (the producer), and which only pass it on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tapscope.comparator.explain.explanation import Explanation
from tapscope.comparator.finding import Finding, Place, Verdict
from tapscope.comparator.graph import Graph, Inputs
from tapscope.comparator.names import PARTIAL


@dataclass(frozen=True, slots=True)
class Divergence:
    """A place where the runs part on their own account."""

    module: str
    """Module whose doing it is; the enclosing one where the value came from between its parts."""
    site: str
    """The finest recorded site that shows it."""
    finding: Finding
    step: int
    """First target step in which it shows."""
    place: Place | None
    """The row that is furthest off."""
    inputs: str
    """``close``, or ``not captured`` where the sites before it stand in, or ``unknown`` where nothing does."""
    evidence: str
    """One sentence: what agrees before it and what does not behind it."""
    is_certain: bool = True
    """False when the site differs only by what is usual at its depth: nothing before it was compared."""
    explanation: Explanation | None = None
    """What the hypotheses say; None where the values were not looked at."""


def localise(
    findings: Sequence[Finding], matched: Sequence[int], graph: Graph, inputs: Sequence[Inputs]
) -> tuple[list[Finding], list[Divergence]]:
    """Give every bad finding its role, and list the modules that produce errors, in execution order.

    ``matched`` are the indices of the findings that are nodes of the ``graph``; ``inputs`` belong to the nodes.
    """
    bad = [findings[i].verdict in (Verdict.DIFFERS, Verdict.NONFINITE) for i in matched]
    nodes = [n for n in range(len(matched)) if bad[n] and _adds(findings[matched[n]])]
    nodes = [n for n in nodes if not any(bad[i] for i in inputs[n].nodes)]
    nodes = _finest(nodes, graph)
    if not nodes and any(bad):
        nodes = [bad.index(True)]  # everything is off from the first site on, or grew by small steps
    roles = {matched[n]: "producer" for n in nodes}
    first = matched[nodes[0]] if nodes else len(findings)
    marked = [
        replace(f, role=roles.get(i) or ("downstream" if f.verdict.is_bad and i > first else ""))
        for i, f in enumerate(findings)
    ]
    found = {d.module: d for n in reversed(nodes) if (d := _divergence(marked, matched, graph, inputs, n))}
    return marked, sorted(found.values(), key=lambda d: d.finding.order)


_SAID = {
    "captured": "close",
    "inside": "close",
    "same": "close",
    "around": "not captured",
    "before": "not captured",
}


def _adds(finding: Finding) -> bool:
    return finding.verdict is Verdict.NONFINITE or finding.test == "replicas" or finding.growth > 1.0


def _finest(nodes: list[int], graph: Graph) -> list[int]:
    """Without a module whose own part already explains it, and without a later view of a value already named."""
    paths = {graph.nodes[n].path for n in nodes}
    return [n for n in nodes if not any(_within(other, graph.nodes[n].path) for other in paths)]


def _within(path: str, ancestor: str) -> bool:
    return path != ancestor and (not ancestor or path.startswith(f"{ancestor}."))


def _divergence(
    findings: Sequence[Finding], matched: Sequence[int], graph: Graph, inputs: Sequence[Inputs], node: int
) -> Divergence:
    finding, where = findings[matched[node]], graph.nodes[node]
    path = where.path.removesuffix(PARTIAL)
    module = path.rpartition(".")[0] if where.is_input else path
    how = inputs[node].how
    said = _SAID.get(how, "unknown")
    largest = max((s.error for s in finding.steps), default=0.0)
    step = next((s.step for s in finding.steps if s.error >= 0.5 * largest), 0)
    before = findings[matched[inputs[node].nodes[-1]]].site if inputs[node].nodes else ""
    evidence = _evidence(finding, how, before, where.is_input)
    return Divergence(module, finding.site, finding, step, finding.worst, said, evidence, bool(how))


def _evidence(finding: Finding, how: str, before: str, is_input: bool) -> str:
    if is_input and before:
        return f"what the sites up to {before} hold agrees; what reaches {finding.site} does not"
    return {
        "captured": "inputs close",
        "inside": "inputs and everything inside it close",
        "same": "its inputs close",
        "around": f"its inputs were not captured on both sides; the sites up to {before} are close",
        "before": f"its inputs were not captured on both sides; the sites up to {before} are close",
    }.get(how, "nothing before it was compared")
