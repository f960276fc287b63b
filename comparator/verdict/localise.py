"""Localize: find the site that adds an error which its inputs do not have (the producer), and the sites that inherit
it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median

from msgspec import Struct, structs

from tapscope.comparator.alignment.layout import is_mask
from tapscope.comparator.facts import Place, StepResult
from tapscope.comparator.matching.repeated_calls import has_repeated_calls
from tapscope.comparator.noise_floor.constants import DEFAULT_CONDITION
from tapscope.comparator.noise_floor.graph import Graph
from tapscope.comparator.noise_floor.node import NO_INPUTS, Inputs, Node
from tapscope.comparator.runs.modules import is_within
from tapscope.comparator.verdict.explanation import Explanation
from tapscope.comparator.verdict.finding import Finding, Verdict
from tapscope.comparator.verdict.token_rows import TokenError
from tapscope.core.deprecation import deprecated_attributes
from tapscope.core.site import port_of

MIN_EVENT_MEMBERS = 3
"""Minimum number of members of an event: two may have separate causes."""


CLEAR_RATIO = 2.0
"""A culprit is certain if its own error exceeds its floor by this factor."""
OUTDONE_RATIO = 2.0 * CLEAR_RATIO
"""Ratio to its floor from which another culprit precedes a first culprit that is not clear."""
SUSPECT_RATIO = 0.5
"""Fraction of its own floor from which an upstream site may be the place where the error begins."""
MAX_HOPS = 3
"""Maximum number of hops from the culprit to the upstream site in question."""
_TESTS_OF_ANY_ERROR = (
    "exact",
    "rule",
    "quantization",
    "weights",
    "tolerance",
    "permuted",
    "missing_gradient",
    "plain",
    "shape",
)
"""Tests that a step fails if its error is nonzero."""
_MIN_CLIPPED = 3
"""Minimum number of gradients with a common gain that count as clipped."""
_EQUAL_GAIN_RTOL = 0.01
"""Maximum relative difference between the gains of two gradients that count as equal."""


@deprecated_attributes({"others": "alternatives"})
class Divergence(Struct, frozen=True):
    """A place where the target adds an error that its inputs do not have."""

    module: str
    """Module that adds the error; for a value computed between submodules, the enclosing module."""
    site: str
    """The innermost recorded site that shows the error."""
    finding: Finding
    step: int
    """First target step that shows the error."""
    place: Place | None
    """The row with the largest error."""
    inputs: str
    """``equal``, ``close``, ``none`` (the module was called without tensors), ``not compared`` (some inputs could not
    be compared), ``not captured`` (preceding sites stand in for the inputs), or ``unknown``."""
    evidence: str
    """One sentence: which sites agree upstream, and which differ downstream."""
    is_certain: bool = True
    """False if no site before this one was compared, if some of its inputs or calls could not be compared, or if a site
    directly upstream was recorded but not compared."""
    explanation: Explanation | None = None
    """Result of the hypothesis tests; None if the values were not examined."""
    alternatives: tuple[str, ...] = ()
    """Other modules that may have added the error, which the evidence hardly distinguishes from :attr:`module`."""
    shared: tuple[str, ...] = ()
    """Other modules whose parameters, or their gradients, are affected by the same event, such as an optimizer step."""
    tokens: tuple[TokenError, ...] = ()
    """The rows above the floor in :attr:`step`, in order, up to 8."""
    num_tokens: int = 0
    """Number of rows above the floor, over all steps."""

    def __repr__(self) -> str:
        doubt = "" if self.is_certain else ", not certain"
        return f"<Divergence {self.module or '(root)'}, step {self.step}{doubt}: {self.finding!r}>"


def localise(
    findings: Sequence[Finding], matched: Sequence[int], graph: Graph, inputs: Sequence[Inputs]
) -> tuple[list[Finding], list[Divergence]]:
    """Assign a role to every bad finding, and list the modules that produce errors, in the order of their onsets.

    ``matched`` contains the indices of the findings that are nodes of ``graph``; ``inputs`` belong to the nodes.
    """
    bad = {n: onset(findings[i]) for n, i in enumerate(matched) if findings[i].verdict.is_bad}
    nodes = [n for n in bad if _adds_error(findings[matched[n]]) and not _inherits(n, bad, graph, inputs)]
    nodes = _without_clipped(nodes, bad, graph, [findings[i] for i in matched])
    nodes = _first_and_clear(_without_explained_modules(nodes, graph), bad, findings, matched)
    if not nodes and bad:
        # All sites are bad from the first one on, or the error grew in small steps. Different choices rank last,
        # because they follow from their scores.
        nodes = [min(bad, key=lambda n: (findings[matched[n]].test == "exact", bad[n], n))]
    roles = {i: "downstream" for i, f in enumerate(findings) if f.verdict.is_bad} if nodes else {}
    roles |= {matched[n]: "producer" for n in nodes}
    marked = [structs.replace(f, role=role) if (role := roles.get(i)) else f for i, f in enumerate(findings)]
    owners = {graph.nodes[n].path for n in nodes if graph.nodes[n].is_summed}
    divergences = []
    for n, rest in group_by_event(nodes, bad, graph).items():
        shared = dict.fromkeys(graph.nodes[i].path for i in rest)
        shared.pop(graph.nodes[n].path, None)
        divergence = _divergence(marked, matched, graph, inputs, n, bad[n], owners)
        divergences.append(structs.replace(divergence, shared=tuple(shared)))
    outdone = any(min(d.finding.added_error_ratio, d.finding.ratio) > OUTDONE_RATIO for d in divergences)
    divergences.sort(key=lambda d: (d.step, outdone and not _is_clear(d.finding), d.finding.order))
    return marked, list({d.module: d for d in reversed(divergences)}.values())[::-1]


def onset(finding: Finding) -> int:
    """Return the first target step that shows a bad finding; 0 if the steps do not determine it."""
    if finding.test == "replicas" and finding.worst is not None:
        return finding.worst.step  # not from the steps: the replica that they compare may be correct
    steps = finding.result.steps
    tests: list[Callable[[StepResult], bool]] = []
    if finding.result.num_nonfinite_mismatch:
        tests.append(lambda s: s.num_nonfinite_mismatch > 0)
    if finding.test in _TESTS_OF_ANY_ERROR:
        tests.append(lambda s: s.error > 0.0)
    if (row_floor := finding.row_floor) > 0.0:
        tests.append(lambda s: s.error > row_floor)
    if finding.test in ("median_row", "scale") and (floor := finding.floor) > 0.0:
        tests.append(lambda s: s.rel_l2 > floor)
    half = 0.5 * max((s.error for s in steps), default=0.0)
    tests.append(lambda s: s.error >= half)
    return next((s.step for test in tests for s in steps if test(s)), 0)


def _adds_error(finding: Finding) -> bool:
    return finding.verdict is Verdict.NONFINITE or finding.test == "replicas" or finding.added_error_ratio > 1.0


def _inherits(node: int, bad: dict[int, int], graph: Graph, inputs: Sequence[Inputs]) -> bool:
    """Return whether an earlier error explains the error of a node.

    Candidates are an input that became wrong earlier, a gradient or weight that determines the next step, and for an
    input computed by the host any error of an earlier step.
    """
    if any(i in bad and _onset_key(i, bad, graph) < _onset_key(node, bad, graph) for i in inputs[node].nodes):
        return True
    is_outside = graph.nodes[node].is_input and not graph.enclosing(node)  # a loop may compute it from an earlier step
    return any(step < bad[node] and (is_outside or _affects_next_step(graph.nodes[i])) for i, step in bad.items())


def _without_clipped(nodes: list[int], bad: dict[int, int], graph: Graph, findings: Sequence[Finding]) -> list[int]:
    """Drop parameter gradients that differ only by a common factor, if other gradients differ by more.

    Clipping by the global norm propagates one wrong gradient to all others as a factor.
    """
    summed = [n for n in bad if graph.nodes[n].is_summed and findings[n].result.distribution is not None]
    gains = [spread.gain for n in summed if (spread := findings[n].result.distribution)]
    common = median(gains) if gains else 0.0
    clipped = {n for n in summed if _is_scaled(findings[n], common)}
    rest = [n for n in nodes if n not in clipped]
    is_common = len(clipped) >= _MIN_CLIPPED and 2 * len(clipped) > len(summed)
    return rest if is_common and any(graph.nodes[n].is_summed for n in rest) else nodes


def _is_scaled(finding: Finding, gain: float) -> bool:
    """Return whether the finding's gain equals ``gain`` and explains the whole error up to the floor."""
    own, room = finding.result.distribution, finding.floor + _EQUAL_GAIN_RTOL * abs(gain)
    if own is None or finding.error > abs(gain) + room:
        return False
    return abs(own.gain - gain) <= room or own.errors[0] == 0.0  # most rows of an embedding's gradient have no token


def _onset_key(node: int, bad: dict[int, int], graph: Graph) -> tuple[int, bool, int]:
    """Return a sort key for the moment at which a node became wrong; within a step, optimizer updates come last."""
    return bad[node], graph.nodes[node].is_trained, node


def _affects_next_step(node: Node) -> bool:
    """Return whether an error of the node affects all values of the next step."""
    return node.is_backward or node.is_trained


def _first_and_clear(
    nodes: list[int], bad: dict[int, int], findings: Sequence[Finding], matched: Sequence[int]
) -> list[int]:
    """Return the first node, and the other nodes that clearly add an error.

    Every site downstream of a culprit inherits some of its error, so a small added error proves little.
    """
    first = min(nodes, key=lambda n: (bad[n], n), default=-1)
    return [
        n
        for n in nodes
        if n == first
        or findings[matched[n]].added_error_ratio > CLEAR_RATIO
        or not findings[matched[n]].added_error_ratio
    ]


def _without_explained_modules(nodes: list[int], graph: Graph) -> list[int]:
    """Drop module outputs whose own submodules explain the error; a gradient does not explain a value."""

    def is_explained(n: int) -> bool:
        others = (i for i in nodes if graph.is_backward[n] or not graph.is_backward[i])
        return any(is_within(graph.nodes[i].path, graph.nodes[n].path) for i in others)

    return [n for n in nodes if graph.nodes[n].is_input or not is_explained(n)]


def _divergence(
    findings: Sequence[Finding],
    matched: Sequence[int],
    graph: Graph,
    inputs: Sequence[Inputs],
    node: int,
    step: int,
    owners: Collection[str],
) -> Divergence:
    finding, source = findings[matched[node]], inputs[node].source
    module, *others = graph.blamed(node, owners)
    if finding.test == "missing_gradient" and (path := graph.nodes[node].path) != module:  # the gradient's own module
        module, others = path, [module, *others]
    before = findings[matched[inputs[node].nodes[-1]]].site if inputs[node].nodes else ""
    this = graph.nodes[node]
    uncompared = [] if this.is_input else _not_compared(findings, this.path)
    equal = all(findings[matched[i]].verdict is Verdict.SAME for i in inputs[node].nodes)
    evidence = _evidence(finding, source, before, this.is_input, "equal" if equal else "close", uncompared)
    if module in owners and graph.nodes[node].path != module:
        evidence += f"; of its consumers only {module} has a parameter with a wrong gradient of its own"
    evidence += _one_sided_mask(findings, module)
    near = _earlier_suspect(findings, matched, graph, inputs, node)
    if near is not None:
        others.insert(0, module)
        module = graph.blamed(near)[0]
        at = findings[matched[near]]
        evidence += f"; {at.site} before it is at {at.ratio:.2g} of its own floor, so it may begin there"
    mixed = [each for n in (node, *inputs[node].nodes) if _is_mixed(each := findings[matched[n]])]
    if mixed:
        evidence += f"; {mixed[0].site} was called several times in a step, and the calls cannot be matched"
    input_state = _INPUT_STATES.get(source, "unknown")
    if uncompared:
        input_state = "not compared"
    elif equal and input_state == "close":
        input_state = "equal"
    rest = tuple(name for name in dict.fromkeys(others) if name != module)
    return Divergence(
        module=module,
        site=finding.site,
        finding=finding,
        step=step,
        place=finding.worst,
        inputs=input_state,
        evidence=evidence,
        is_certain=bool(source) and not uncompared and not mixed,
        alternatives=rest,
    )


def _is_mixed(finding: Finding) -> bool:
    """Return whether a side contains several calls of a module per step that were compared without token rows.

    One of these calls may depend on another.
    """
    pair, rows = finding.result.pair, finding.rows.num_compared
    return not rows and any(has_repeated_calls(side) for side in (pair.baseline, pair.target) if side is not None)


def _one_sided_mask(findings: Sequence[Finding], module: str) -> str:
    """Return a note about a mask that the module received in one run only; without a mask, every position is visible.

    Empty if the modules have different signatures, so that one run has other additional inputs.
    """
    one_sided = [f for f in findings if f.verdict.is_orphan and f.site.startswith(f"{module}:in[")]
    if len(one_sided) != 1 or not is_mask(one_sided[0].site):
        return ""
    run = "baseline" if one_sided[0].verdict is Verdict.ONLY_BASELINE else "target"
    return f"; {port_of(one_sided[0].site)} was given in the {run} only"


def _is_clear(finding: Finding) -> bool:
    return max(finding.added_error_ratio, finding.ratio) > CLEAR_RATIO


def _earlier_suspect(
    findings: Sequence[Finding], matched: Sequence[int], graph: Graph, inputs: Sequence[Inputs], node: int
) -> int | None:
    """Return the first upstream site that is almost a culprit itself, if the actual culprit barely exceeds its floor.

    The culprit's error must not exceed the upstream error times the default condition. Values are related to values,
    and gradients to gradients.
    """
    finding = findings[matched[node]]
    if _is_clear(finding) or finding.judged_by not in ("rounding", "noise_run"):
        return None
    seen, front, earliest = {node}, [node], None
    for _ in range(MAX_HOPS):
        front = [i for n in front for i in inputs[n].nodes if i not in seen and not graph.nodes[i].is_state]
        seen.update(front)
        for i in sorted(front, reverse=True):
            upstream, same_direction = findings[matched[i]], graph.nodes[i].is_backward == graph.nodes[node].is_backward
            explains = finding.error <= DEFAULT_CONDITION * upstream.error
            if (
                same_direction
                and explains
                and upstream.verdict is Verdict.CLOSE
                and upstream.added_error_ratio > SUSPECT_RATIO
            ):
                earliest = i if earliest is None else min(earliest, i)
    return earliest


def _evidence(finding: Finding, source: str, before: str, is_input: bool, state: str, uncompared: Sequence[str]) -> str:
    if is_input and before:
        return f"the sites up to {before} agree, but {finding.site} receives different values"
    sentence = {
        "captured": f"inputs {state}",
        "submodules": f"inputs and everything inside it {state}",
        "aliased": f"its inputs {state}",
        "enclosing_module": f"its inputs were not captured on both sides; the sites up to {before} are {state}",
        "preceding": f"its inputs were not captured on both sides; the sites up to {before} are {state}",
        NO_INPUTS: "its module has no tensor inputs: the host passed other values",
    }.get(source, "nothing before it was compared")
    return f"{sentence}, but {' and '.join(uncompared)} could not be compared" if uncompared else sentence


def _not_compared(findings: Sequence[Finding], path: str) -> list[str]:
    """Return the input ports of a module that have different shapes in the two runs."""
    inputs = (f for f in findings if f.site.startswith(f"{path}:in[") and f.verdict is Verdict.SHAPE)
    return [port_of(f.site) for f in inputs]


_INPUT_STATES = {
    "captured": "close",
    "submodules": "close",
    "aliased": "close",
    "enclosing_module": "not captured",
    "preceding": "not captured",
    NO_INPUTS: "none",
}


def group_by_event(nodes: Sequence[int], bad: Mapping[int, int], graph: Graph) -> dict[int, list[int]]:
    """Group divergent nodes by event; return the first node of each event -> its other members, in order.

    An event (an optimizer step, a clip, a checkpoint) changes many parameters or gradients in one step. No single
    module causes it, so it is one divergence. Most nodes are alone.

    ``bad`` maps a node to the step in which it became wrong. Parameters updated in one step belong together. Other
    parameters, and gradients, belong together if most of the compared ones became wrong in that step.
    """
    by_event: dict[int, list[int]] = {}
    groups: dict[tuple[bool, int], list[int]] = {}
    for n in sorted(nodes, key=lambda n: (bad[n], n)):
        node = graph.nodes[n]
        if node.is_summed or (node.is_state and node.port.startswith("param[")):
            groups.setdefault((node.is_summed, bad[n]), []).append(n)
        else:
            by_event[n] = []
    for (is_summed, step), members in groups.items():
        if len(members) >= MIN_EVENT_MEMBERS and (
            _are_trained(members, graph) or _are_most(is_summed, step, bad, graph)
        ):
            by_event[members[0]] = members[1:]
        else:
            by_event |= {n: [] for n in members}
    return by_event


def _are_trained(members: Collection[int], graph: Graph) -> bool:
    return all(graph.nodes[n].is_trained for n in members)


def _are_most(is_summed: bool, step: int, bad: Mapping[int, int], graph: Graph) -> bool:
    """Return whether more than half of the compared nodes of this kind became wrong in ``step``."""
    of_this_kind = [
        n for n, node in enumerate(graph.nodes) if node.port.startswith("param[") and node.is_summed == is_summed
    ]
    return 2 * sum(bad.get(n) == step for n in of_this_kind) > len(of_this_kind)
