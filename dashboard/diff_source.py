"""Data source of the diff screen: all queries of one comparison. Calls may be slow, so workers make them."""

import math
import shlex
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from tapscope.comparator import CompareOptions, Comparison, Finding, TokenView, compare_open_runs
from tapscope.comparator.pair_analysis.token_view import PairReader
from tapscope.comparator.report.answer import counts
from tapscope.comparator.report.flags import flags
from tapscope.comparator.report.table import report_account
from tapscope.core.formatting import json_line, plural
from tapscope.dashboard.bookmarks import path_text
from tapscope.dashboard.compare_settings import CompareSettings
from tapscope.dashboard.model.diff import HashedSteps, answer_facts, state
from tapscope.dashboard.model.fact import Fact
from tapscope.dashboard.model.finding import link_of, located
from tapscope.dashboard.model.finding_filter import matching_findings, metric_of, rank_of, share_equal
from tapscope.dashboard.model.finding_grid import site_grid
from tapscope.dashboard.model.grid import Grid, group_of, layer_grid
from tapscope.dashboard.model.module_graph import ModuleGraph, comparison_graph
from tapscope.dashboard.model.pair_values import finding_table
from tapscope.dashboard.model.place_grid import PlaceGrids, place_grids
from tapscope.dashboard.model.run_data import Header
from tapscope.dashboard.model.tensor import worst_value
from tapscope.dashboard.model.token_labels import TokenLabels
from tapscope.dashboard.model.value_table import ValueTable
from tapscope.dashboard.module_tree import contains
from tapscope.run_format.run import Run
from tapscope.sources import open_run

if TYPE_CHECKING:
    from tapscope.comparator.metrics.detail import Detail

SORTS = ("in order", "by error ÷ floor", "by max |Δ|", "by rel l2", "by cosine", "by equal")
SORT_OF_COLUMN = dict(zip(("site", "÷ floor", "max |Δ|", "rel l2", "cosine", "equal"), SORTS, strict=True))
"""Column of the finding table -> sort order that a click on its header selects."""
MAX_CACHED_TOKEN_VIEWS = 32


@dataclass(frozen=True, slots=True)
class DiffQuery:
    """Selection and sort order of the findings on the diff screen."""

    group: str | None = None
    """Name of a row of :func:`~tapscope.dashboard.model.grid.layer_grid`; None for all."""
    path: str = ""
    """Module within ``group`` whose findings, including those of its submodules, are shown; empty for all of the group.
    """
    step: int | None = None
    """Target step in which the findings were compared; None for all."""
    rank: int | None = None
    """Target rank with the finding's largest error; None for all."""
    find: str = ""
    only_bad: bool = False
    sort: str = SORTS[0]
    reverse: bool = False
    """Whether the sort order is reversed."""
    fold: bool = True
    """Whether adjacent downstream findings share one row, if only bad findings are shown in execution order."""

    @property
    def order(self) -> str:
        """Text that describes the sort order."""
        return f"{self.sort}, reversed" if self.reverse else self.sort

    @property
    def folds(self) -> bool:
        """Whether rows are folded under this query."""
        return self.fold and self.only_bad and not self.find and self.sort == SORTS[0] and not self.reverse


class DiffSource:
    """Queries of a comparison of two runs on disk; safe to call from several threads."""

    def __init__(
        self,
        runs: tuple[Run, Run],
        comparison: Comparison,
        flags: CompareOptions | None = None,
        way: CompareSettings | None = None,
        equal_steps: HashedSteps | None = None,
    ) -> None:
        """Index the findings. ``flags`` are the options before ``way`` changed them; ``equal_steps`` is reused if
        given."""
        self._runs, self._comparison = runs, comparison
        self._flags, self._way = flags or comparison.report.options, way or CompareSettings()
        self.report = report = comparison.report
        self.equal_steps = equal_steps or HashedSteps.of(runs)
        self.sites: Grid = site_grid(report.findings, self.equal_steps)
        self.layers: Grid = layer_grid(self.sites)
        self.steps = tuple(each.first for each in self.sites.columns)
        self.ranks = tuple(sorted({rank for f in report.findings if (rank := rank_of(f)) is not None}))
        """Target ranks that have the largest error of a finding."""
        self.header = self._header()
        self._details: dict[int, Detail | None] = {}
        self._token_views: OrderedDict[int, tuple[PairReader | None, TokenView | None]] = OrderedDict()
        self._lock = Lock()
        self._places: PlaceGrids | None = None

    @classmethod
    def open(
        cls,
        paths: tuple[Path, Path],
        options: CompareOptions,
        progress: Callable[[int, int], None] | None = None,
        way: CompareSettings | None = None,
    ) -> "DiffSource":
        """Open both runs and compare them by ``options``, changed by ``way``. Raises the errors of open_run and
        compare."""
        way = way or CompareSettings()
        first, second = paths[::-1] if way.swapped else paths
        baseline = open_run(first)
        try:
            target = open_run(second)
            try:
                comparison = compare_open_runs(baseline, target, way.of(options), _sites_only(progress))
                return cls((baseline, target), comparison, options, way)
            except BaseException:
                target.close()
                raise
        except BaseException:
            baseline.close()
            raise

    def again(self, way: CompareSettings, progress: Callable[[int, int], None] | None = None) -> "DiffSource":
        """Compare the same open runs with other settings.

        A new tolerance only judges the existing measurements again; swapped sides are compared from scratch. Raises the
        errors of :meth:`Comparison.rejudged` and compare.
        """
        options = way.of(self._flags)
        if way.swapped == self._way.swapped:
            return DiffSource(self._runs, self._comparison.rejudged(options), self._flags, way, self.equal_steps)
        runs = self._runs[::-1]
        comparison = compare_open_runs(*runs, options, _sites_only(progress))
        return DiffSource(runs, comparison, self._flags, way, self.equal_steps.swapped())

    def shares_runs(self, other: "DiffSource") -> bool:
        """Return whether both sources use the same open runs."""
        return any(self._runs[0] is each for each in other._runs)

    @property
    def culprit(self) -> Finding | None:
        """The finding of the first divergence, else the first bad finding; None if all are good."""
        first = self.report.first_divergence
        if first is not None:
            return self.report.findings[first.finding.order]
        return next((f for f in self.report.findings if f.verdict.is_bad), None)

    @property
    def answer(self) -> tuple[Fact, ...]:
        """The four lines at the end of the output of `tapscope diff`."""
        return answer_facts(self.report)

    @property
    def runs(self) -> dict[str, str]:
        """Path -> name of baseline and target, in this order."""
        return {path_text(run.path): run.name for run in self._runs}

    def link(self, finding: Finding) -> str:
        """Return the permalink of the finding's worst element, with its index if the target run provides it."""
        link = link_of(finding, (self.report.baseline.name, self.report.target.name))
        return str(located(link, finding.worst, self._runs[1]) if finding.target is not None else link)

    def findings(self, query: DiffQuery) -> list[Finding]:
        """Return the findings that match the query, in its sort order."""
        every = self.report.findings
        matches = np.broadcast_to(matching_findings(every, query.find), len(every)).tolist()
        column = None if query.step is None else self.sites.column_of(query.step)
        compared = None if column is None else (self.sites.codes[:, column] > 0).tolist()
        findings = [
            f
            for i, f in enumerate(every)
            if (query.group is None or group_of(f.site)[0] == query.group)
            and contains(query.path, f.site)
            and (query.step is None or (compared is not None and compared[i]))
            and (query.rank is None or rank_of(f) == query.rank)
            and (not query.only_bad or f.verdict.is_bad)
            and matches[i]
        ]
        if query.sort != SORTS[0]:
            findings.sort(key=_WORST_FIRST[query.sort])
        return findings[::-1] if query.reverse else findings

    def next_cause(self, order: int, direction: int) -> Finding | None:
        """Return the next (``direction`` > 0) or previous independent cause in execution order, wrapping around."""
        causes = sorted({divergence.finding.order for divergence in self.report.divergences})
        if not causes:
            return None
        after = [each for each in causes if (each > order if direction > 0 else each < order)]
        return self.report.findings[(after or causes)[0 if direction > 0 else -1]]

    def next_bad(self, order: int, direction: int) -> Finding | None:
        """Return the next (``direction`` > 0) or previous bad finding in execution order, wrapping around."""
        bad = [f for f in self.report.findings if f.verdict.is_bad]
        if direction > 0:
            return next((f for f in bad if f.order > order), bad[0] if bad else None)
        return next((f for f in reversed(bad) if f.order < order), bad[-1] if bad else None)

    def cached(self, finding: Finding) -> tuple[bool, TokenView | None]:
        """Return (whether the token view is cached, the token view); never reads payloads."""
        with self._lock:
            return finding.order in self._token_views, self._token_views.get(finding.order, (None, None))[1]

    def token_view(self, finding: Finding) -> TokenView | None:
        """Return the finding's errors per token row; the latest 32 are cached. Raises DataError."""
        return self._read(finding)[1]

    def _read(self, finding: Finding) -> tuple[PairReader | None, TokenView | None]:
        with self._lock:
            cached = self._token_views.get(finding.order)
        if cached is None:
            reader = self._comparison.reader(finding)
            cached = reader, None if reader is None else reader.token_view()
            with self._lock:
                self._token_views[finding.order] = cached
                while len(self._token_views) > MAX_CACHED_TOKEN_VIEWS:
                    self._token_views.popitem(last=False)
        return cached

    def places(self, progress: Callable[[int, int], None]) -> PlaceGrids:
        """Return the heat maps of sites × ranks and sites × tokens, measured on the first call. Raises DataError."""
        if self._places is None:
            self._places = place_grids(self._comparison, progress)
        return self._places

    def modules(self) -> ModuleGraph:
        """Return the module graph of both runs, with the errors of their sites."""
        return comparison_graph(self.header.name, self.report.findings, self._runs, self._comparison.origins())

    def table(self, finding: Finding) -> ValueTable | None:
        """Return all values of the finding as a table that reads on demand; None if no payload was compared.

        Raises DataError.
        """
        names = self.report.baseline.name, self.report.target.name
        return finding_table(finding, self._read(finding)[0], names, self._tokens)

    def worst_value(self, finding: Finding, step: int | None = None) -> tuple[int, int]:
        """Return row and column of the finding's largest error, within one target step if given. Raises DataError."""
        view = self.token_view(finding)
        return (0, 0) if view is None else worst_value(view, None if step is None else (step, step))

    @cached_property
    def _tokens(self) -> TokenLabels:
        return TokenLabels.of(self._runs[::-1], self._runs[1].step_lines(), self.report.options.tokenizer)

    def detail(self, finding: Finding) -> "Detail | None":
        """Return the detailed measures of a finding, computed on the first call and cached.

        None without values, or if all values are equal. Raises DataError.
        """
        if finding.order not in self._details:
            self._details[finding.order] = self._comparison.detail(finding)
        return self._details[finding.order]

    def account(self) -> list[Text]:
        """Return coverage, assumptions, missing data and the answer as lines."""
        return [Text(line.plain, style=line.style) for line in report_account(self.report)]

    def command(self, finding: Finding | None) -> str:
        """Return the equivalent ``tapscope diff`` command line."""
        words = ["tapscope", "diff", *(str(run.path) for run in self._runs)]
        words += flags(self.report.options, sites=finding is None)
        if finding is not None:
            words += ["--site", finding.site, "--all"]
        return shlex.join(words)

    def export(self, folder: Path) -> Path:
        """Write the whole report as JSON lines, as `tapscope diff --json` prints it; never overwrite a file."""
        stem = f"diff-{self._runs[0].name}-{self._runs[1].name}"
        path = next(p for i in range(10**6) if not (p := folder / f"{stem}{f'-{i}' if i else ''}.jsonl").exists())
        with path.open("x", encoding="utf-8") as file:
            for line in self.report.to_json():
                file.write(json_line(line) + "\n")
        return path

    def close(self) -> None:
        """Close the memory-mapped files."""
        for run in self._runs:
            run.close()

    def _header(self) -> Header:
        report = self.report
        partial = report.coverage.partial
        open_runs = [h.name for h in (report.baseline, report.target) if h.is_open]
        facts = [
            counts(report),
            _judging_options(report.options),
            " → ".join(dict.fromkeys(h.precision for h in (report.baseline, report.target) if h.dtype)),
            plural(len(self.steps), "step"),
            f"still open: {', '.join(open_runs)}" if open_runs else "",
        ]
        name = f"{report.baseline.name} → {report.target.name}"
        first = report.first_divergence or next((f for f in report.findings if f.verdict.is_bad), None)
        difference = "" if first is None else first.site
        return Header(name, tuple(fact for fact in facts if fact), state(report), tuple(partial), difference)


def _sites_only(progress: Callable[[int, int], None] | None) -> Callable[[int, int, int, int], None] | None:
    return None if progress is None else lambda num, total, *_: progress(num, total)


def _judging_options(options: CompareOptions) -> str:
    """Describe the options that change verdicts: tolerances, noise run, rules. Empty for the rounding model alone."""
    words = [f"{name} {value:g}" for name in ("rtol", "atol") if (value := getattr(options, name))]
    words += ["exact"] if options.tolerance == (0.0, 0.0) else []
    words += [f"noise run {options.noise_run.name}"] if options.noise_run is not None else []
    num_rules = len(options.rules) + len(options.mapping.rules)
    return " ".join(words + ([plural(num_rules, "rule")] if num_rules else []))


def _nan_to_inf(error: float) -> float:
    """Map nan to inf, so that values that are non-finite in one run only sort first."""
    return math.inf if math.isnan(error) else error


_WORST_FIRST: dict[str, Callable[[Finding], float]] = {
    "by error ÷ floor": lambda finding: -finding.ratio,
    "by max |Δ|": lambda finding: -_nan_to_inf(metric_of("max_abs", -1.0)(finding)),
    "by rel l2": lambda finding: -_nan_to_inf(metric_of("rel_l2", -1.0)(finding)),
    "by cosine": lambda finding: -_nan_to_inf(-metric_of("cosine", math.inf)(finding)),
    "by equal": share_equal,
}
