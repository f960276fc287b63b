"""Measure, the third stage: assemble, align and measure every pair of sites."""

from collections.abc import Callable, Sequence
from itertools import accumulate, count

from msgspec import Struct, structs

from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.matching.match import Pair
from tapscope.comparator.metrics.images import conv_modules_of
from tapscope.comparator.metrics.near_zero_rows import norm_modules_of
from tapscope.comparator.options.options import CompareOptions
from tapscope.comparator.pair_analysis.pair_analyzer import PairAnalyzer
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.pair_analysis.pool import Workers, analyze_all, num_stored_bytes
from tapscope.comparator.pair_analysis.tolerance_counts import with_tolerance_of
from tapscope.comparator.pair_analysis.worker_processes import WorkerProcesses
from tapscope.comparator.pipeline.match_runs import MatchedRuns
from tapscope.comparator.runs.series import Series

Progress = Callable[[int, int, int, int], None]
"""Callback with (sites measured, number of sites, bytes measured, total bytes)."""


class MeasuredRuns(Struct, frozen=True):
    """Two runs with measured pairs, before any judgment."""

    matched: MatchedRuns
    results: list[PairResult]
    """One result per pair, in the order of the pairs."""
    analyzer: PairAnalyzer

    def with_options(self, options: CompareOptions) -> "MeasuredRuns":
        """Return the same measurements, to be judged by other options that select and measure the same values.

        Raises DataError if elements beyond a new tolerance must be counted and the values can no longer be read.
        """
        matched = structs.replace(self.matched, opened=structs.replace(self.matched.opened, options=options))
        analyzer = self.analyzer.with_preparer(_preparer(matched), options.tolerance)
        is_known = options.tolerance == self.analyzer.tolerance
        return MeasuredRuns(matched, self.results if is_known else with_tolerance_of(analyzer, self.results), analyzer)

    def up_to(self, step: int) -> "MeasuredRuns":
        """Measure again up to and including a target step, with the baseline's steps of the same rows."""
        pairs = [early for one in self.results if (early := _up_to(one.pair, step)) is not None]
        analyzer = self.analyzer.with_preparer(_preparer(self.matched), self.analyzer.tolerance)
        return MeasuredRuns(self.matched, _examine(analyzer, pairs, _processes(self.matched)), analyzer)


def measure_pairs(matched: MatchedRuns, progress: Progress | None = None) -> MeasuredRuns:
    """Measure every pair.

    A pair that cannot be compared states the reason in its result; no content of the runs raises an error.
    """
    analyzer, workers = analyzer_of(matched), _processes(matched)
    if matched.opened.options.ray is not None:
        from tapscope.comparator.pipeline.ray_workers import RayWorkers

        workers = RayWorkers(matched)
    return MeasuredRuns(matched, _examine(analyzer, matched.pairs, workers, progress), analyzer)


def analyzer_of(matched: MatchedRuns) -> PairAnalyzer:
    """Return the analyzer that compares the pairs of these runs."""
    options = matched.opened.options
    analyzer = PairAnalyzer(_preparer(matched), options.tolerance, options.detail)
    analyzer.has_gradients = any(p.baseline is not None and p.baseline.site.endswith(".grad") for p in matched.pairs)
    analyzer.norm_modules = matched.qualified(norm_modules_of(matched.sites))
    analyzer.conv_modules = matched.qualified(conv_modules_of(matched.sites))
    return analyzer


def _preparer(matched: MatchedRuns) -> PairPreparer:
    opened = matched.opened
    return PairPreparer(opened.baseline, opened.target, opened.rows, opened.options.shift_steps, opened.options.ranks)


def _processes(matched: MatchedRuns) -> Workers | None:
    jobs = matched.opened.options.jobs
    return WorkerProcesses(jobs) if jobs > 1 else None


def _examine(
    analyzer: PairAnalyzer, pairs: Sequence[Pair], workers: Workers | None, progress: Progress | None = None
) -> list[PairResult]:
    if progress is None:
        return analyze_all(analyzer, pairs, lambda: None, workers)
    sizes = list(map(num_stored_bytes, pairs))
    num_done, num_bytes, total = count(1), accumulate(sizes), sum(sizes)
    return analyze_all(analyzer, pairs, lambda: progress(next(num_done), len(pairs), next(num_bytes), total), workers)


def _up_to(pair: Pair, step: int) -> Pair | None:
    """Return a pair without the target's firings after a step, or None if no target firing remains."""
    target = None if pair.target is None else _firings_up_to(pair.target, step)
    return None if target is None and pair.target is not None else structs.replace(pair, target=target)


def _firings_up_to(series: Series, step: int) -> Series | None:
    if series.firings[-1].step <= step:
        return series
    firings = tuple(firing for firing in series.firings if firing.step <= step)
    sources = tuple(each for one in series.sources if (each := _firings_up_to(one, step)) is not None)
    return structs.replace(series, firings=firings, sources=sources) if firings else None
