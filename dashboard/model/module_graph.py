"""Module graph of a run or comparison, in execution order, with class, shapes, error, and data flow per module."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tapscope.comparator import Finding, Verdict
from tapscope.core import dtypes
from tapscope.core.formatting import shape
from tapscope.core.site import module_of
from tapscope.dashboard.model.data_flow import FUNCTION, Flow, FlowValue, data_flows, is_input, is_output
from tapscope.dashboard.model.finding import SideView, finding_view
from tapscope.dashboard.model.grid import CODES, Cell
from tapscope.dashboard.model.number import MISSING, Number, ratio
from tapscope.dashboard.module_tree import SiteNode, modules_of
from tapscope.render.anomalies import anomaly_of
from tapscope.run_format.record import Record
from tapscope.run_format.records import Records
from tapscope.run_format.run import Run

FIRST_ROWS = 60
"""Limit on the number of rows of the initially unfolded levels."""
_VERDICTS = {code: verdict for verdict, code in CODES.items()}


@dataclass(frozen=True, slots=True)
class ModuleNode:
    """One module of the graph."""

    path: str
    """Empty for the model itself."""
    name: str
    """``q_proj``, ``layers.3``, or ``(root)``."""
    cls: str
    """Class of the module; empty if not recorded."""
    depth: int
    """Number of ancestors."""
    parent: int | None
    """Index of the parent module."""
    shape: str
    """Shape of the module's output, else of its first value, in the target; empty if there is none."""
    dtype: str
    """Short dtype of the same value; ``fp32 → bf16`` if the runs differ."""
    site: str
    """Representative site: the worst one of a comparison, else the output or the first one."""
    verdict: str
    """Worst verdict of the module's own sites; for a single run ``nonfinite`` or empty."""
    worst_inside: str
    """Worst verdict in the module's subtree, including the module."""
    glyph: str
    """One character for the error, as in the heat map; ``·`` if nothing was compared."""
    ratio: Number
    """Largest error ÷ floor of the module's own sites."""
    is_cause: bool
    """Whether the module adds its own error."""


@dataclass(frozen=True, slots=True)
class DataFlow:
    """Data flow from the output of one module to the input of another."""

    producer: int
    consumer: int
    through: str = ""
    """Empty if the bytes are equal; a function between the modules that the values prove, such as ``add``; or
    ``function`` for a flow that is inferred from the order of the modules."""

    @property
    def is_inferred(self) -> bool:
        """Whether the flow is inferred and not proven by values."""
        return self.through == FUNCTION


@dataclass(frozen=True, slots=True)
class ModuleGraph:
    """Modules in preorder; siblings are in order of their first records."""

    title: str
    nodes: tuple[ModuleNode, ...]
    flows: tuple[DataFlow, ...]
    """One flow per pair of modules, of the strongest kind of :mod:`~tapscope.dashboard.model.data_flow`."""
    folded: tuple[int, ...]
    """Indices of the initially folded modules. Whole levels are unfolded while the tree is short, and all paths to
    causes."""

    def producers(self, node: int) -> dict[str, list[ModuleNode]]:
        """Return function -> modules whose outputs this module received through the function."""
        return self._by_function((each.through, each.producer) for each in self.flows if each.consumer == node)

    def consumers(self, node: int) -> dict[str, list[ModuleNode]]:
        """Return function -> modules that received this module's output through the function."""
        return self._by_function((each.through, each.consumer) for each in self.flows if each.producer == node)

    def _by_function(self, flows: Iterable[tuple[str, int]]) -> dict[str, list[ModuleNode]]:
        modules: dict[str, list[ModuleNode]] = {}
        for through, node in sorted(flows, key=lambda each: _strength(each[0])):
            modules.setdefault(through, []).append(self.nodes[node])
        return modules


@dataclass(frozen=True, slots=True)
class _Value:
    """Value at one site of a module, of a run or a comparison."""

    site: str
    shape: str
    dtype: str
    verdict: Verdict | None
    ratio: float = np.nan
    is_cause: bool = False


def comparison_graph(
    title: str, findings: Sequence[Finding], runs: Sequence[Run], origins: Sequence[int | None]
) -> ModuleGraph:
    """Build the module graph of a comparison.

    ``runs`` are baseline and target, ``origins`` the result of :meth:`Comparison.origins`. Flows through functions are
    found in the first step of the target, on its lowest rank.
    """
    flows = [Flow(findings[i].site, findings[n].site) for n, i in enumerate(origins) if i is not None]
    flows += _through_functions(findings, runs[-1], {flow.consumer for flow in flows})
    return _graph(title, list(map(_compared, findings)), runs, flows)


def run_graph(run: Run, records: Records) -> ModuleGraph:
    """Build the module graph of ``records``: one step on one rank, in execution order."""
    values: list[_Value] = []
    for record in records:
        anomaly, site = anomaly_of(record), record.key.site
        is_bad = anomaly is not None and anomaly.kind == "nonfinite"
        kind = dtypes.short(record.dtype) if record.dtype else "value"
        values.append(_Value(site, shape(record.shape), kind, Verdict.NONFINITE if is_bad else None))
    return _graph(run.name, values, [run], data_flows(_flow_values(run, records)))


def _through_functions(findings: Sequence[Finding], target: Run, known: Container[str]) -> Iterator[Flow]:
    """Yield the flows through functions between sites of findings, except to consumers in ``known``."""
    records = target.records
    if not len(records):
        return
    records = records.of([int(records.step.min())])
    records = records.of(ranks=[min(record.key.rank for record in records)])
    sites: dict[str, list[str]] = {}
    for finding in findings:
        if finding.target is not None:
            sites.setdefault(finding.target.site, []).append(finding.site)
    for flow in data_flows(_flow_values(target, records)):
        if flow.through:
            for consumer in sites.get(flow.consumer, ()):
                if consumer not in known:
                    yield from (Flow(one, consumer, flow.through) for one in sites.get(flow.producer, ()))


def _flow_values(run: Run, records: Iterable[Record]) -> Iterator[FlowValue]:
    for record in records:
        if record.hash is not None and record.dtype is not None:
            read = None if record.entry is None else partial(run.array, record)
            yield FlowValue(record.key.site, record.dtype, tuple(record.shape), record.hash, record.bag, read)


def _compared(finding: Finding) -> _Value:
    view = finding_view(finding)
    sides = [side for side in (view.baseline, view.target) if side is not None]
    kinds = " → ".join(dict.fromkeys(side.dtype for side in sides))
    shown: SideView = sides[-1]
    value = finding.ratio if finding.basis != "none" else np.nan
    return _Value(finding.site, shown.shape, kinds, finding.verdict, value, finding.role == "producer")


def _graph(title: str, values: Sequence[_Value], runs: Iterable[Run], flows: Iterable[Flow]) -> ModuleGraph:
    classes = {module_of(site): info.cls for run in runs for site, info in run.sites.items() if info.cls}
    own: dict[str, dict[str, _Value]] = {}
    for value in values:
        own.setdefault(module_of(value.site), {}).setdefault(value.site, value)
    modules = sorted(modules_of([value.site for value in values]).values(), key=lambda each: each.first)
    codes = np.array([max((CODES[v.verdict] for v in own.get(m.path, {}).values()), default=0) for m in modules])
    parents = {child.path: module.first for module in modules for child in module.children.values()}
    nodes: list[ModuleNode] = []
    for module, code in zip(modules, codes.tolist(), strict=True):
        parent = parents.get(module.path)
        depth = 0 if parent is None else nodes[parent].depth + 1
        inside = int(codes[module.first : module.stop].max())
        kind = classes.get(module.path, "")
        nodes.append(_node(module, list(own.get(module.path, {}).values()), kind, depth, parent, (code, inside)))
    data_flows = _flows(flows, {module.path: module.first for module in modules})
    return ModuleGraph(title, tuple(nodes), data_flows, _folded(nodes))


def _node(
    module: SiteNode, values: list[_Value], cls: str, depth: int, parent: int | None, codes: tuple[int, int]
) -> ModuleNode:
    outputs = [value for value in values if is_output(value.site)]
    shown = next(iter(outputs + values), None)
    largest = max((value.ratio for value in values if not np.isnan(value.ratio)), default=np.nan)
    bad = [value for value in values if value.verdict is not None and value.verdict.is_bad]
    worst = max(bad, key=lambda value: (CODES[value.verdict], value.ratio), default=shown)
    verdict, inside = (_VERDICTS[code] for code in codes)
    return ModuleNode(
        path=module.path,
        name=_name(module),
        cls=cls,
        depth=depth,
        parent=parent,
        shape=shown.shape if shown is not None else "",
        dtype=shown.dtype if shown is not None else "",
        site=worst.site if worst is not None else "",
        verdict=str(verdict or ""),
        worst_inside=str(inside or ""),
        glyph=Cell(verdict, largest).glyph,
        ratio=ratio(largest) if not np.isnan(largest) else MISSING,
        is_cause=any(value.is_cause for value in values),
    )


def _name(module: SiteNode) -> str:
    """Return the module's name; a numbered module includes the name of its list."""
    return ".".join(module.path.rsplit(".", 2)[-2:]) if module.name.isdigit() else module.name or "(root)"


def _flows(flows: Iterable[Flow], number: Mapping[str, int]) -> tuple[DataFlow, ...]:
    """Return the flows from outputs to inputs between modules that do not contain each other.

    Each pair of modules appears once, with the strongest kind of flow.
    """
    by_pair: dict[tuple[int, int], DataFlow] = {}
    for flow in flows:
        source, target = module_of(flow.producer), module_of(flow.consumer)
        are_disjoint = not f"{source}.".startswith(f"{target}.") and not f"{target}.".startswith(f"{source}.")
        if is_output(flow.producer) and is_input(flow.consumer) and source and target and are_disjoint:
            pair = number[source], number[target]
            known = by_pair.get(pair)
            if known is None or _strength(flow.through) < _strength(known.through):
                by_pair[pair] = DataFlow(*pair, flow.through)
    return tuple(by_pair.values())


def _strength(through: str) -> int:
    """Rank a kind of flow: 0 for equal bytes, 1 for a proven function, 2 for an inferred flow. Lower is stronger."""
    return 0 if not through else 1 + (through == FUNCTION)


def _folded(nodes: Sequence[ModuleNode]) -> tuple[int, ...]:
    deepest, rows = 0, 0
    for depth in range(max((node.depth for node in nodes), default=0) + 1):
        rows += sum(node.depth == depth for node in nodes)
        if rows > FIRST_ROWS and depth > 1:
            break
        deepest = depth
    parents = {node.parent for node in nodes if node.parent is not None}
    folded = {i for i in parents if nodes[i].depth >= deepest}
    for node in nodes:
        above = node.parent if node.is_cause else None
        while above is not None:
            folded.discard(above)
            above = nodes[above].parent
    return tuple(sorted(folded))
