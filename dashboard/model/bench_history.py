"""History of benchmark results over commits, and comparison of two commits."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from tapscope.core.errors import DataError
from tapscope.core.formatting import did_you_mean, middle, plural
from tapscope.dashboard.model.bench_noise import BenchNoise, bench_noise
from tapscope.dashboard.model.bench_result import METRICS, BenchConfig, BenchFiles, BenchMetric, StoredResult
from tapscope.dashboard.model.number import MISSING, Number

MAX_COMMITS = 500
"""Maximum number of commits shown; the newest ones are kept."""
SHORT_COMMIT = 10
_UNDATED = datetime.min.replace(tzinfo=UTC)

Verdict = Literal["regression", "improvement", "within noise", "only baseline", "only target"]
_ORDER: tuple[Verdict, ...] = ("regression", "improvement", "only baseline", "only target", "within noise")


@dataclass(frozen=True, slots=True)
class CommitView:
    """Column of the history: a commit with its results."""

    commit: str
    """Commit hash, or the name of the folder or file if none is known."""
    label: str
    """Shortened hash or name."""
    date: str
    branch: str
    run: str
    run_url: str
    num_results: int


@dataclass(frozen=True, slots=True)
class MetricSeries:
    """Series of one metric of one configuration: parallel tuples with one element per commit that has the metric."""

    metric: str
    commits: tuple[int, ...]
    """Indices of :attr:`BenchHistory.commits`, ascending."""
    values: tuple[float, ...]
    """Mean over the repeats."""
    formatted: tuple[str, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    """Upper end of the 99 % confidence interval; ``low`` is the lower end."""
    counts: tuple[int, ...]
    """Number of repeats."""
    noise: str
    """Source of the noise estimate behind the interval."""


@dataclass(frozen=True, slots=True)
class ConfigSeries:
    """All metrics of one configuration."""

    config: BenchConfig
    metrics: tuple[MetricSeries, ...]


@dataclass(frozen=True, slots=True)
class BenchHistory:
    """Series of all configurations and metrics over commits."""

    commits: tuple[CommitView, ...]
    """Oldest first."""
    series: tuple[ConfigSeries, ...]
    metrics: tuple[BenchMetric, ...]
    """Metrics that at least one series has."""
    num_results: int
    summary: str
    problems: tuple[str, ...]
    updated: str
    """Time when the files were read, ISO 8601."""


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    """Comparison of one metric of one configuration between two commits."""

    config: BenchConfig
    metric: BenchMetric
    baseline: Number
    target: Number
    change: Number
    """Relative difference, at least -1; the text is a percentage."""
    band: Number
    """Largest relative difference that noise explains."""
    noise: str
    counts: tuple[int, int]
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class BenchComparison:
    """Comparison of two commits, with regressions first."""

    baseline: CommitView
    target: CommitView
    rows: tuple[ComparedMetric, ...]
    num_regressions: int
    num_improvements: int
    num_within_noise: int
    num_unpaired: int
    summary: str


@dataclass(frozen=True, slots=True)
class _Values:
    """Repeats of one metric, by commit, and their noise."""

    by_commit: dict[str, list[float]]
    noise: BenchNoise


class BenchTable:
    """Table of results by configuration, metric and commit, from which the views are built."""

    def __init__(self, files: BenchFiles) -> None:
        self._files = files
        full = _full_names({stored.result.commit for stored in files.results})
        by_commit: dict[str, list[StoredResult]] = {}
        for stored in files.results:
            by_commit.setdefault(full[stored.result.commit], []).append(stored)
        ordered = sorted(by_commit, key=lambda commit: (min(_date(s) for s in by_commit[commit]), commit))
        self.num_older = max(len(ordered) - MAX_COMMITS, 0)
        self.commits = tuple(_commit_view(commit, by_commit[commit]) for commit in ordered[self.num_older :])
        by_config: dict[BenchConfig, dict[str, dict[str, list[float]]]] = {}
        for view in self.commits:
            for stored in by_commit[view.commit]:
                of_config = by_config.setdefault(stored.result.config, {})
                for name, value in stored.result.metrics.items():
                    of_config.setdefault(name, {}).setdefault(view.commit, []).append(value)
        self._values = {
            config: {name: _Values(each, bench_noise(list(each.values()))) for name, each in of_config.items()}
            for config, of_config in sorted(by_config.items(), key=lambda item: _natural(item[0]))
        }

    def history(self) -> BenchHistory:
        """Return the series of every configuration and metric."""
        index = {view.commit: i for i, view in enumerate(self.commits)}
        known = {name for of_config in self._values.values() for name in of_config}
        problems = list(self._files.problems)
        if self.num_older:
            problems.append(f"{plural(self.num_older, 'older commit')} not shown; the newest {MAX_COMMITS} are")
        num = len(self._files.results)
        summary = f"{plural(num, 'result')} of {plural(len(self._values), 'configuration')} at "
        summary += f"{plural(len(self.commits), 'commit')}, from {plural(self._files.num_files, 'JSON file')}"
        if self._files.num_other:
            summary += f"; {self._files.num_other:,} of them without a benchmark result"
        return BenchHistory(
            self.commits,
            tuple(
                ConfigSeries(
                    config, tuple(_series(m, of_config[m.name], index) for m in METRICS if m.name in of_config)
                )
                for config, of_config in self._values.items()
            ),
            tuple(metric for metric in METRICS if metric.name in known),
            num,
            summary,
            tuple(problems),
            self._files.read_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
        )

    def commit(self, name: str) -> CommitView:
        """Return the commit called ``name``, or the only one with that prefix. Raises DataError."""
        matches = [view for view in self.commits if view.commit.startswith(name)] if name else []
        exact = [view for view in matches if view.commit == name]
        if len(exact or matches) == 1:
            return (exact or matches)[0]
        labels = [view.label for view in self.commits]
        if matches:
            raise DataError(f"{name!r} is ambiguous: {', '.join(view.label for view in matches[:5])}")
        raise DataError(f"no benchmark result of commit {name!r}{did_you_mean(name, labels)}")

    def compare(self, baseline: str, target: str) -> BenchComparison:
        """Compare two commits, each given by its name or an unambiguous prefix. Raises DataError."""
        before, after = self.commit(baseline), self.commit(target)
        rows = [
            row
            for config, of_config in self._values.items()
            for metric in METRICS
            if metric.name in of_config
            and (row := _compared(config, metric, of_config[metric.name], before.commit, after.commit)) is not None
        ]
        rows.sort(key=lambda row: (_ORDER.index(row.verdict), -abs(row.change.value or 0.0)))
        num = {verdict: sum(row.verdict == verdict for row in rows) for verdict in _ORDER}
        unpaired = num["only baseline"] + num["only target"]
        summary = f"{plural(num['regression'], 'regression')}, {plural(num['improvement'], 'improvement')}, "
        summary += f"{num['within noise']:,} within noise"
        summary += f", {unpaired:,} of one commit only" if unpaired else ""
        return BenchComparison(
            before, after, tuple(rows), num["regression"], num["improvement"], num["within noise"], unpaired, summary
        )


def metric_text(value: float) -> str:
    """Format a value with four significant digits, without a fraction from 1000: ``0.01234``, ``98.77``, ``12,346``."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _series(metric: BenchMetric, values: _Values, index: dict[str, int]) -> MetricSeries:
    points = [(index[commit], statistics.fmean(each), len(each)) for commit, each in values.by_commit.items()]
    margins = [values.noise.interval(num) for _, _, num in points]
    return MetricSeries(
        metric=metric.name,
        commits=tuple(at for at, _, _ in points),
        values=tuple(_rounded(mean) for _, mean, _ in points),
        formatted=tuple(metric_text(mean) for _, mean, _ in points),
        low=tuple(_rounded(mean / (1 + margin)) for (_, mean, _), margin in zip(points, margins, strict=True)),
        high=tuple(_rounded(mean * (1 + margin)) for (_, mean, _), margin in zip(points, margins, strict=True)),
        counts=tuple(num for _, _, num in points),
        noise=values.noise.basis,
    )


def _compared(
    config: BenchConfig, metric: BenchMetric, values: _Values, baseline: str, target: str
) -> ComparedMetric | None:
    before, after = values.by_commit.get(baseline, []), values.by_commit.get(target, [])
    counts = (len(before), len(after))
    first = _metric_number(statistics.fmean(before)) if before else MISSING
    second = _metric_number(statistics.fmean(after)) if after else MISSING
    if not before or not after:
        if not before and not after:
            return None
        verdict: Verdict = "only baseline" if before else "only target"
        return ComparedMetric(config, metric, first, second, MISSING, MISSING, values.noise.basis, counts, verdict)
    change = statistics.fmean(after) / statistics.fmean(before) - 1
    band = values.noise.band(*counts)
    size = max(change, 1 / (1 + change) - 1)  # symmetric: +100 % and -50 % are equally large
    if size <= band:
        verdict = "within noise"
    else:
        verdict = "improvement" if (change > 0) == metric.higher_is_better else "regression"
    percent, margin = Number(change, f"{100 * change:+.1f} %"), Number(band, f"± {100 * band:.1f} %")
    return ComparedMetric(config, metric, first, second, percent, margin, values.noise.basis, counts, verdict)


def _metric_number(value: float) -> Number:
    return Number(value, metric_text(value))


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _commit_view(commit: str, stored: Sequence[StoredResult]) -> CommitView:
    first = min(stored, key=_date)
    results = [each.result for each in stored]
    label = commit[:SHORT_COMMIT] if _is_hash(commit) else middle(commit, 24)
    return CommitView(
        commit,
        label,
        first.result.date,
        next((each.branch for each in results if each.branch), ""),
        next((each.run for each in results if each.run), ""),
        next((each.run_url for each in results if each.run_url), ""),
        len(stored),
    )


def _is_hash(text: str) -> bool:
    return len(text) >= 7 and all(char in "0123456789abcdef" for char in text)


def _full_names(commits: set[str]) -> dict[str, str]:
    """Map every commit to its full hash: a short hash maps to the longer hash of which it is an unambiguous prefix."""
    full_names = {}
    for commit in commits:
        longer = [each for each in commits if _is_hash(commit) and len(each) > len(commit) and each.startswith(commit)]
        longest = max(longer, key=len, default=commit)
        full_names[commit] = longest if all(longest.startswith(each) for each in longer) else commit
    return full_names


def _date(stored: StoredResult) -> datetime:
    try:
        date = datetime.fromisoformat(stored.result.date)
    except ValueError:
        return _UNDATED
    return date if date.tzinfo else date.replace(tzinfo=UTC)


def _natural(config: BenchConfig) -> tuple[str, str, str, str, tuple[int, str], str]:
    """Sort key that puts ``batch 8`` before ``batch 16``."""
    digits = "".join(char for char in config.load if char.isdigit())[:9]
    return config.model, config.hardware, config.variant, config.tool, (int(digits or 0), config.load), config.workload
