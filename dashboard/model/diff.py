"""View of a comparison of two runs, with causes before downstream findings."""

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from tapscope.comparator import Divergence, Finding, Header, Report, Verdict
from tapscope.comparator.options import fail_on
from tapscope.comparator.report.answer import LABEL, answer, cause, headline
from tapscope.comparator.report.flags import flags
from tapscope.comparator.report.table import report_account
from tapscope.core.formatting import plural
from tapscope.core.site import layer_of
from tapscope.dashboard.model.fact import Fact
from tapscope.dashboard.model.finding import FindingView, finding_view, link_of, located
from tapscope.dashboard.model.finding_grid import EqualSteps, site_grid
from tapscope.dashboard.model.grid import Grid, GridData, layer_grid
from tapscope.dashboard.model.number import Number, ratio
from tapscope.run_format.run import Run

_Recorded = dict[str, frozenset[int]]
"""Site -> steps in which it was recorded."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts about a run, for the page header."""

    name: str
    path: str
    model: str
    framework: str
    precision: str
    mesh: str
    """Mesh axes with sizes above 1, ``tp2 pp2``; empty for one rank."""
    steps: int
    records: int
    is_open: bool
    provenance: tuple[Fact, ...] = ()
    """Further facts of the manifest: creation time, host, and versions."""


@dataclass(frozen=True, slots=True)
class VerdictCount:
    """Number of findings with one verdict."""

    verdict: str
    glyph: str
    count: int


@dataclass(frozen=True, slots=True)
class CauseView:
    """A divergence: the module that adds an error, and its downstream findings."""

    number: int
    """Number of the cause, starting at 1."""
    order: int
    """Position of the cause's finding in execution order."""
    module: str
    site: str
    layer: int | None
    headline: str
    """The difference and its size, in one line."""
    cause: str
    """Hypothesis that explains the values; empty if no hypothesis does."""
    evidence: str
    step: int
    where: str
    ratio: Number
    is_certain: bool
    others: tuple[str, ...]
    """Other modules that may have added the error."""
    link: str
    """Permalink of the worst element in the first bad step."""
    downstream: tuple[int, ...]
    """Positions of the bad findings that only propagate an error, up to the next cause in execution order."""


@dataclass(frozen=True, slots=True)
class DiffView:
    """Content of a comparison for a web page, a report file or a screen."""

    title: str
    state: str
    """``DIFFERS``, ``NOT COMPARABLE``, ``PARTIAL`` or ``AGREES``."""
    exit_code: int
    answer: tuple[Fact, ...]
    """``what``, ``where``, ``why`` and ``next``."""
    counts: tuple[VerdictCount, ...]
    baseline: RunFacts
    target: RunFacts
    causes: tuple[CauseView, ...]
    findings: tuple[FindingView, ...]
    """Findings in execution order; only the worst ones if there are more than the requested maximum."""
    num_findings: int
    account: tuple[Fact, ...]
    """Facts about coverage, assumptions and missing data."""
    options: tuple[Fact, ...]
    """Options with non-default values."""
    command: str
    """Command line that reproduces the result."""
    layers: GridData = field(default_factory=lambda: GridData((), ()))
    version: str = ""
    """Version of tapscope that made the comparison."""


def diff_view(
    report: Report,
    runs: tuple[Run, Run] | None = None,
    *,
    equal_steps: EqualSteps = lambda finding: (),
    max_findings: int = 2000,
    grid: Grid | None = None,
    max_steps: int = 1000,
) -> DiffView:
    """Build the view of a report.

    ``runs`` supply provenance and permalinks. ``grid`` is the heat map of all sites, built here if not given. Steps
    beyond ``max_steps`` are binned by their maximum; findings beyond ``max_findings`` are dropped, the best ones first.
    """
    from tapscope._version import __version__

    names = report.baseline.name, report.target.name
    kept = worst_findings(report.findings, max_findings)
    sites = site_grid(report.findings, equal_steps) if grid is None else grid
    return DiffView(
        title=f"{names[0]} → {names[1]}",
        state=state(report),
        exit_code=report.exit_code,
        answer=answer_facts(report),
        counts=verdict_counts(report),
        baseline=_run_facts(report.baseline, runs[0] if runs else None),
        target=_run_facts(report.target, runs[1] if runs else None),
        causes=causes(report, runs),
        findings=tuple(finding_view(finding, names) for finding in kept),
        num_findings=len(report.findings),
        account=_account(report),
        options=_options(report),
        command=command(report),
        layers=layer_grid(sites).binned(max_steps).data(),
        version=__version__,
    )


class HashedSteps:
    """Target steps for which a finding has no measurement, because hashes of both sides are equal.

    Empty if the measurement may be missing for other reasons, such as unaligned rows.
    """

    def __init__(self, recorded: tuple[_Recorded, _Recorded]) -> None:
        """``recorded`` are the steps of each site, in baseline and target."""
        self._recorded = recorded

    @classmethod
    def of(cls, runs: tuple[Run, Run]) -> "HashedSteps":
        """Index the steps of two runs, baseline and target."""
        return cls((_recorded(runs[0]), _recorded(runs[1])))

    def swapped(self) -> "HashedSteps":
        """Return the same index with the sides swapped."""
        return HashedSteps(self._recorded[::-1])

    def __call__(self, finding: Finding) -> frozenset[int]:
        """Return the target steps in which the finding's hashes are equal."""
        rows, sides = finding.rows, (finding.baseline, finding.target)
        is_whole = not (rows.num_forked or rows.num_unaligned or rows.num_absent) and finding.basis in (
            "hash",
            "values",
        )
        if not is_whole or sides[0] is None or sides[1] is None:
            return frozenset()
        known = [steps.get(side.site, frozenset()) for steps, side in zip(self._recorded, sides, strict=True) if side]
        steps = known[1] if rows.num_compared else known[0] & known[1]
        return steps.difference(result.step for result in finding.steps) if finding.steps else steps


def _recorded(run: Run) -> _Recorded:
    """Return the steps in which each site was recorded."""
    numbers, site_of = run.records.site_codes()
    steps, step_of = np.unique(run.records.step, return_inverse=True)
    num_steps = np.int64(max(len(steps), 1))
    places = np.sort(site_of * num_steps + step_of)  # faster than np.unique, which hashes every element
    sites, columns = np.divmod(places[np.diff(places, prepend=-1) > 0], num_steps)
    bounds, fired = np.searchsorted(sites, range(len(numbers) + 1)).tolist(), steps[columns].tolist()
    return {site: frozenset(fired[bounds[i] : bounds[i + 1]]) for site, i in numbers.items()}


def answer_facts(report: Report) -> tuple[Fact, ...]:
    """Return the four lines at the end of the output of `tapscope diff`."""
    return tuple(Fact(line[:LABEL].strip(), line[LABEL:]) for line in answer(report))


def verdict_counts(report: Report) -> tuple[VerdictCount, ...]:
    """Return the number of findings per verdict, for the verdicts that occur."""
    counts = {verdict: sum(f.verdict is verdict for f in report.findings) for verdict in Verdict}
    return tuple(VerdictCount(str(verdict), verdict.glyph, num) for verdict, num in counts.items() if num)


def causes(report: Report, runs: tuple[Run, Run] | None = None) -> tuple[CauseView, ...]:
    """Return every divergence with its downstream findings, in the order in which the errors start."""
    downstream = downstream_of(report)
    return tuple(
        _cause(number, divergence, downstream[divergence.finding.order], _link(report, divergence, runs))
        for number, divergence in enumerate(report.divergences, 1)
    )


def downstream_of(report: Report) -> dict[int, tuple[int, ...]]:
    """Return order of a cause -> orders of its downstream findings.

    A downstream finding belongs to the last preceding cause in execution order, or to the first cause if none precedes.
    """
    orders = sorted({divergence.finding.order for divergence in report.divergences})
    by_cause: dict[int, list[int]] = {order: [] for order in orders}
    for finding in report.findings if orders else ():
        if finding.role == "downstream":
            before = [order for order in orders if order < finding.order]
            by_cause[before[-1] if before else orders[0]].append(finding.order)
    return {order: tuple(own) for order, own in by_cause.items()}


def _cause(number: int, divergence: Divergence, downstream: Sequence[int], link: str) -> CauseView:
    finding, place = divergence.finding, divergence.place
    where = [f"step {divergence.step}"]
    where += [] if place is None or place.rank is None else [f"rank {place.rank}"]
    where += [] if place is None else [place.text()]
    return CauseView(
        number=number,
        order=finding.order,
        module=divergence.module or "(root)",
        site=divergence.site,
        layer=layer_of(divergence.module) if divergence.module else None,
        headline=headline(divergence),
        cause=cause(divergence),
        evidence=divergence.evidence,
        step=divergence.step,
        where=", ".join(where),
        ratio=ratio(finding.ratio) if finding.floor > 0.0 else Number(None, "-"),
        is_certain=divergence.is_certain,
        others=divergence.alternatives,
        link=link,
        downstream=tuple(downstream),
    )


@dataclass(frozen=True, slots=True)
class Downstream:
    """Consecutive downstream findings that are shown as one row."""

    findings: tuple[Finding, ...]

    @property
    def text(self) -> str:
        """Text of the row: ``258 downstream``."""
        return f"{len(self.findings):,} downstream"


def fold_downstream(findings: Sequence[Finding]) -> list[Finding | Downstream]:
    """Replace each group of two or more adjacent downstream findings by one row."""
    rows: list[Finding | Downstream] = []
    for is_downstream, group in groupby(findings, key=lambda finding: finding.role == "downstream"):
        members = tuple(group)
        rows += [Downstream(members)] if is_downstream and len(members) > 1 else members
    return rows


def _link(report: Report, divergence: Divergence, runs: tuple[Run, Run] | None) -> str:
    finding, place = divergence.finding, divergence.place
    link = link_of(finding, (report.baseline.name, report.target.name))
    if place is None or finding.target is None:
        return str(link)
    rank = link.rank if place.rank is None else place.rank
    link = replace(link, step=place.step, rank=rank, index=place.in_shard or place.element or None)
    return str(link if runs is None else located(link, place, runs[1]))


def state(report: Report) -> str:
    """Return the outcome: ``DIFFERS``, ``NOT COMPARABLE``, ``PARTIAL`` or ``AGREES``."""
    if any(f.verdict in (Verdict.DIFFERS, Verdict.NONFINITE) for f in report.findings):
        return "DIFFERS"
    return "NOT COMPARABLE" if report.num_bad else "PARTIAL" if fail_on.PARTIAL in report.met else "AGREES"


def worst_findings(findings: Sequence[Finding], limit: int) -> list[Finding]:
    """Return the ``limit`` worst findings in execution order.

    Producers rank first, then other bad findings, then by error ÷ floor.
    """
    if len(findings) <= limit:
        return list(findings)
    ranked = sorted(findings, key=lambda f: (f.role != "producer", not f.verdict.is_bad, -_finite(f.ratio)))
    return sorted(ranked[:limit], key=lambda f: f.order)


def command(report: Report) -> str:
    """Return the command line that reproduces the report."""
    words = ["tapscope", "diff", report.baseline.path, report.target.path, *flags(report.options)]
    return shlex.join(words)


def _options(report: Report) -> tuple[Fact, ...]:
    words = flags(report.options)
    facts: list[Fact] = []
    for word in words:
        if word.startswith("--"):
            facts.append(Fact(word, ""))
        elif facts:
            facts[-1] = Fact(facts[-1].label, f"{facts[-1].text} {word}".strip())
    return tuple(facts)


def _account(report: Report) -> tuple[Fact, ...]:
    """Return the lines of the text report without headers, verdicts and answer."""
    lines = [line.plain for line in report_account(report)]
    facts = [Fact(line[:LABEL].strip(), line[LABEL:]) for line in lines if line.strip()]
    left_out = {"baseline", "target", "verdicts", "what", "where", "why", "next"}
    return tuple(fact for fact in facts if fact.label not in left_out)


def _run_facts(header: Header, run: Run | None) -> RunFacts:
    mesh = " ".join(f"{axis}{size}" for axis, size in header.mesh.items() if size > 1)
    facts = (header.name, header.path, header.model, header.framework, header.precision, mesh)
    return RunFacts(
        *facts, header.num_steps, header.num_records, header.is_open, tuple(_provenance(run)) if run else ()
    )


_PROVENANCE = ("created", "host", "hostname", "tapscope", "version", "torch", "commit", "format", "id", "run_id")


def _provenance(run: Run) -> Iterable[Fact]:
    for name in _PROVENANCE:
        value = run.manifest.get(name)
        if isinstance(value, str | int | float):
            yield Fact(name, str(value))
    if run.world_size > 1:
        yield Fact("ranks", plural(run.world_size, "rank"))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf
