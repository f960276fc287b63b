"""Localise: which site adds an error that its inputs do not have (the producer), and which sites only pass it on."""

from collections.abc import Callable, Collection, Sequence
from statistics import median

from msgspec import Struct, structs

from tapscope.comparator.alignment.layout import is_mask
from tapscope.comparator.facts import Place, StepResult
from tapscope.comparator.matching.repeated_calls import has_repeated_calls
from tapscope.comparator.noise_floor.constants import DEFAULT_CONDITION
from tapscope.comparator.noise_floor.graph import Graph
from tapscope.comparator.noise_floor.node import Inputs, Node
from tapscope.comparator.runs.modules import is_within
from tapscope.comparator.verdict.explanation import Explanation
from tapscope.comparator.verdict.finding import Finding, Verdict
from tapscope.comparator.verdict.optimizer_events import events
from tapscope.comparator.verdict.token_rows import TokenError

CLEAR = 2.0
"""A culprit whose own error exceeds this times its floor is certain."""
OUTDONE = 2.0 * CLEAR
"""Another culprit that adds this times its floor comes first where the first one is not clear."""
NEARLY = 0.5
"""A site upstream with this share of its own floor may be where the error begins."""
HOPS = 3
"""How many steps upstream that may be."""
_AT_ONCE = ("exact", "rule", "tolerance", "permuted", "absent", "plain", "shape")
"""Tests that a step fails as soon as its error is not zero."""
_FEWEST = 3
"""Fewest gradients that can have a common gain."""
_ALIKE = 0.01
"""Share of a common gain up to which the gains of two gradients are equal."""


class Divergence(Struct, frozen=True):
    """A place where the target adds an error of its own."""

    module: str
    """Module that adds the error; the enclosing one for a value that was computed between its parts."""
    site: str
    """The innermost recorded site that shows it."""
    finding: Finding
    step: int
    """First target step in which it shows."""
    place: Place | None
    """The row that is furthest off."""
    inputs: str
    """``equal``, ``close``, ``not compared`` where some could not be, ``not captured`` where the sites before it stand
    in, or ``unknown`` where nothing does."""
    evidence: str
    """One sentence: what agrees upstream, and what does not downstream."""
    is_certain: bool = True
    """False when the site differs only by what is usual at its depth: nothing before it was compared."""
    explanation: Explanation | None = None
    """What the hypotheses say; None where the values were not looked at."""
    others: tuple[str, ...] = ()
    """Modules that may have added the error instead: the evidence hardly tells them apart."""
    shared: tuple[str, ...] = ()
    """Modules whose parameters, or their gradients, are off by the same event, see :mod:`.events`."""
    tokens: tuple[TokenError, ...] = ()
    """The rows beyond the floor in that step, in order of rows, the first :data:`.tokens.MAX_TOKENS`."""
    num_tokens: int = 0
    """How many rows are beyond it in all steps."""

    def __repr__(self) -> str:
        doubt = "" if self.is_certain else ", not certain"
        return f"<Divergence {self.module or '(root)'}, step {self.step}{doubt}: {self.finding!r}>"


def localise(
    findings: Sequence[Finding], matched: Sequence[int], graph: Graph, inputs: Sequence[Inputs]
) -> tuple[list[Finding], list[Divergence]]:
    """Give every bad finding its role, and list the modules that produce errors, in the order in which they began.

    ``matched`` are the indices of the findings that are nodes of the ``graph``; ``inputs`` belong to the nodes.
    """
    bad = {n: onset(findings[i]) for n, i in enumerate(matched) if findings[i].verdict.is_bad}
    nodes = [n for n in bad if _adds(findings[matched[n]]) and not _inherits(n, bad, graph, inputs)]
    nodes = _own(nodes, bad, graph, [findings[i] for i in matched])
    nodes = _clear(_finest(nodes, graph), bad, findings, matched)
    if not nodes and bad:
        # All is off from the first site on, or grew by small steps; a choice that differs follows from its scores.
        nodes = [min(bad, key=lambda n: (findings[matched[n]].test == "exact", bad[n], n))]
    roles = {i: "downstream" for i, f in enumerate(findings) if f.verdict.is_bad} if nodes else {}
    roles |= {matched[n]: "producer" for n in nodes}
    marked = [structs.replace(f, role=role) if (role := roles.get(i)) else f for i, f in enumerate(findings)]
    owners = {graph.nodes[n].path for n in nodes if graph.nodes[n].is_summed}
    found = []
    for n, rest in events(nodes, bad, graph).items():
        shared = dict.fromkeys(graph.nodes[i].path for i in rest)
        shared.pop(graph.nodes[n].path, None)
        one = _divergence(marked, matched, graph, inputs, n, bad[n], owners)
        found.append(structs.replace(one, shared=tuple(shared)))
    outdone = any(min(d.finding.growth, d.finding.ratio) > OUTDONE for d in found)
    found.sort(key=lambda d: (d.step, outdone and not _is_clear(d.finding), d.finding.order))
    return marked, list({d.module: d for d in reversed(found)}.values())[::-1]


def onset(finding: Finding) -> int:
    """The first target step in which a bad finding shows; 0 where the steps do not tell."""
    if finding.test == "replicas" and finding.worst is not None:
        return finding.worst.step  # the replica that is compared with the other run may be right
    largest = max((s.error for s in finding.steps), default=0.0)
    tests: tuple[Callable[[StepResult], bool], ...] = (
        lambda s: s.nonfinite > 0,
        lambda s: finding.test in _AT_ONCE and s.error > 0.0,
        lambda s: s.error > finding.row_floor > 0.0,
        lambda s: finding.test in ("typical", "gain") and s.rel_l2 > finding.floor > 0.0,
        lambda s: s.error >= 0.5 * largest,
    )
    return next((s.step for test in tests for s in finding.steps if test(s)), 0)


def _adds(finding: Finding) -> bool:
    return finding.verdict is Verdict.NONFINITE or finding.test == "replicas" or finding.growth > 1.0


def _inherits(node: int, bad: dict[int, int], graph: Graph, inputs: Sequence[Inputs]) -> bool:
    """Whether what went into a node was wrong by then, a gradient or weight that all of the next step is made of, or in
    an earlier step anything behind which the host made what it handed in."""
    if any(i in bad and _when(i, bad, graph) < _when(node, bad, graph) for i in inputs[node].nodes):
        return True
    is_outside = graph.nodes[node].is_input and not graph.enclosing(node)  # a loop may have made it of an earlier step
    return any(step < bad[node] and (is_outside or _lasts(graph.nodes[i])) for i, step in bad.items())


def _own(nodes: list[int], bad: dict[int, int], graph: Graph, findings: Sequence[Finding]) -> list[int]:
    """Without the parameters' gradients that are off by one common factor alone, where others are off by more: a clip
    by the norm of all of them hands what is wrong of one on to every other."""
    summed = [n for n in bad if graph.nodes[n].is_summed and findings[n].seen.spread is not None]
    gains = [spread.gain for n in summed if (spread := findings[n].seen.spread)]
    common = median(gains) if gains else 0.0
    clipped = {n for n in summed if _is_scaled(findings[n], common)}
    rest = [n for n in nodes if n not in clipped]
    is_common = len(clipped) >= _FEWEST and 2 * len(clipped) > len(summed)
    return rest if is_common and any(graph.nodes[n].is_summed for n in rest) else nodes


def _is_scaled(finding: Finding, gain: float) -> bool:
    """Whether a common gain of that size is its own, and all of its error up to its floor."""
    own, room = finding.seen.spread, finding.floor + _ALIKE * abs(gain)
    if own is None or finding.error > abs(gain) + room:
        return False
    return abs(own.gain - gain) <= room or own.errors[0] == 0.0  # most rows of an embedding's have no token


def _when(node: int, bad: dict[int, int], graph: Graph) -> tuple[int, bool, int]:
    """When a node began to be wrong: what an optimizer makes of a parameter comes behind all else of the step."""
    return bad[node], graph.nodes[node].is_trained, node


def _lasts(node: Node) -> bool:
    """Whether what is wrong of it in one step is in all values of the next."""
    return node.is_backward or node.is_trained


def _clear(nodes: list[int], bad: dict[int, int], findings: Sequence[Finding], matched: Sequence[int]) -> list[int]:
    """The first, and of the others those that add clearly: behind a culprit every site carries some of its error."""
    first = min(nodes, key=lambda n: (bad[n], n), default=-1)
    return [n for n in nodes if n == first or findings[matched[n]].growth > CLEAR or not findings[matched[n]].growth]


def _finest(nodes: list[int], graph: Graph) -> list[int]:
    """Without the output of a module whose own part already explains it."""
    paths = {graph.nodes[n].path for n in nodes}
    return [
        n for n in nodes if graph.nodes[n].is_input or not any(is_within(other, graph.nodes[n].path) for other in paths)
    ]


def _divergence(
    findings: Sequence[Finding],
    matched: Sequence[int],
    graph: Graph,
    inputs: Sequence[Inputs],
    node: int,
    step: int,
    owners: Collection[str],
) -> Divergence:
    finding, how = findings[matched[node]], inputs[node].how
    module, *others = graph.blamed(node, owners)
    if finding.test == "absent" and (path := graph.nodes[node].path) != module:  # whose gradient it is
        module, others = path, [module, *others]
    before = findings[matched[inputs[node].nodes[-1]]].site if inputs[node].nodes else ""
    own = graph.nodes[node]
    apart = [] if own.is_input else _not_compared(findings, own.path)
    equal = all(findings[matched[i]].verdict is Verdict.SAME for i in inputs[node].nodes)
    evidence = _evidence(finding, how, before, own.is_input, "equal" if equal else "close", apart)
    if module in owners and graph.nodes[node].path != module:
        evidence += f"; of those that consume it only {module} has a parameter whose gradient is wrong by itself"
    evidence += _one_sided(findings, module)
    near = _nearly(findings, matched, graph, inputs, node)
    if near is not None:
        others.insert(0, module)
        module = graph.blamed(near)[0]
        at = findings[matched[near]]
        evidence += f"; {at.site} before it is at {at.ratio:.2g} of its own floor, so it may begin there"
    mixed = [each for n in (node, *inputs[node].nodes) if _is_mixed(each := findings[matched[n]])]
    if mixed:
        evidence += (
            f"; {mixed[0].site} was called several times in a step, and the runs do not tell which call is which"
        )
    said = _SAID.get(how, "unknown")
    said = "not compared" if apart else "equal" if said == "close" and equal else said
    rest = tuple(name for name in dict.fromkeys(others) if name != module)
    return Divergence(
        module,
        finding.site,
        finding,
        step,
        finding.worst,
        said,
        evidence,
        bool(how) and not apart and not mixed,
        others=rest,
    )


def _is_mixed(finding: Finding) -> bool:
    """Whether it is of several calls of a module in one step, compared whole: one of them may be made of another."""
    pair, rows = finding.seen.pair, finding.rows.compared
    return not rows and any(has_repeated_calls(side) for side in (pair.baseline, pair.target) if side is not None)


def _one_sided(findings: Sequence[Finding], module: str) -> str:
    """What is to be said of a mask that a module was given in one run alone, with none it sees everything; nothing of
    modules that frameworks call differently, where one run alone has other inputs too."""
    alone = [f for f in findings if f.verdict.is_orphan and f.site.startswith(f"{module}:in[")]
    if len(alone) != 1 or not is_mask(alone[0].site):
        return ""
    run = "baseline" if alone[0].verdict is Verdict.ONLY_BASELINE else "target"
    return f"; {alone[0].site.rpartition(':')[2]} was given in the {run} alone"


def _is_clear(finding: Finding) -> bool:
    return max(finding.growth, finding.ratio) > CLEAR


def _nearly(
    findings: Sequence[Finding], matched: Sequence[int], graph: Graph, inputs: Sequence[Inputs], node: int
) -> int | None:
    """The first site in front of a culprit that only just failed to be one, where the culprit only just is and its
    error is no more than a module may make of that site's; of the values for a value, of the gradients for a gradient.
    """
    finding = findings[matched[node]]
    if _is_clear(finding) or finding.judged_by not in ("rounding", "twin"):
        return None
    seen, front, found = {node}, [node], None
    for _ in range(HOPS):
        front = [i for n in front for i in inputs[n].nodes if i not in seen and not graph.nodes[i].is_state]
        seen.update(front)
        for i in sorted(front, reverse=True):
            one, alike = findings[matched[i]], graph.nodes[i].is_backward == graph.nodes[node].is_backward
            explains = finding.error <= DEFAULT_CONDITION * one.error
            if alike and explains and one.verdict is Verdict.CLOSE and one.growth > NEARLY:
                found = i if found is None else min(found, i)
    return found


def _evidence(finding: Finding, how: str, before: str, is_input: bool, state: str, apart: Sequence[str]) -> str:
    if is_input and before:
        return f"what the sites up to {before} hold agrees; what reaches {finding.site} does not"
    said = {
        "captured": f"inputs {state}",
        "inside": f"inputs and everything inside it {state}",
        "same": f"its inputs {state}",
        "around": f"its inputs were not captured on both sides; the sites up to {before} are {state}",
        "before": f"its inputs were not captured on both sides; the sites up to {before} are {state}",
    }.get(how, "nothing before it was compared")
    return f"{said}, but {' and '.join(apart)} could not be compared" if apart else said


def _not_compared(findings: Sequence[Finding], path: str) -> list[str]:
    """Ports of what a module was given that both runs have and that do not fit."""
    inputs = (f for f in findings if f.site.startswith(f"{path}:in[") and f.verdict is Verdict.SHAPE)
    return [f.site.rpartition(":")[2] for f in inputs]


_SAID = {
    "captured": "close",
    "inside": "close",
    "same": "close",
    "around": "not captured",
    "before": "not captured",
}
