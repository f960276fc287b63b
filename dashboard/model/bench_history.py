"""BenchHistory: benchmark results over commits, and the comparison of two commits."""

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
"""The newest are shown."""
SHORT_COMMIT = 10
_UNDATED = datetime.min.replace(tzinfo=UTC)

Verdict = Literal["regression", "improvement", "within noise", "only baseline", "only target"]
_ORDER: tuple[Verdict, ...] = ("regression", "improvement", "only baseline", "only target", "within noise")


@dataclass(frozen=True, slots=True)
class CommitView:
    """A column of the history."""

    commit: str
    """Or the name of the folder or file, if nothing names a commit."""
    label: str
    """Shortened."""
    date: str
    branch: str
    run: str
    run_url: str
    num_results: int


@dataclass(frozen=True, slots=True)
class MetricSeries:
    """One metric of one configuration; parallel tuples, one element per commit that has it."""

    metric: str
    commits: tuple[int, ...]
    """Indices of :attr:`BenchHistory.commits`, ascending."""
    values: tuple[float, ...]
    """Means of the repeats."""
    formatted: tuple[str, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    """99 % confidence interval."""
    counts: tuple[int, ...]
    """Repeats."""
    noise: str
    """What the interval is estimated from."""


@dataclass(frozen=True, slots=True)
class ConfigSeries:
    """All metrics of one configuration."""

    config: BenchConfig
    metrics: tuple[MetricSeries, ...]


@dataclass(frozen=True, slots=True)
class BenchHistory:
    """Results over commits."""

    commits: tuple[CommitView, ...]
    """Oldest first."""
    series: tuple[ConfigSeries, ...]
    metrics: tuple[BenchMetric, ...]
    """Those that some series has."""
    num_results: int
    summary: str
    problems: tuple[str, ...]
    updated: str
    """When the files were read, ISO 8601."""


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    """One metric of one configuration at two commits."""

    config: BenchConfig
    metric: BenchMetric
    baseline: Number
    target: Number
    change: Number
    """Relative difference, from -1 on; the text is a percentage."""
    band: Number
    """Largest relative difference that noise explains."""
    noise: str
    counts: tuple[int, int]
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class BenchComparison:
    """Two commits; regressions first."""

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
    """Repeats of one metric, by commit."""

    by_commit: dict[str, list[float]]
    noise: BenchNoise


class BenchTable:
    """Results by configuration, metric and commit: what the views are made of."""

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
        """The series of every configuration and metric."""
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
        """The commit of this name, or the only one that begins with it. Raises DataError."""
        matches = [view for view in self.commits if view.commit.startswith(name)] if name else []
        exact = [view for view in matches if view.commit == name]
        if len(exact or matches) == 1:
            return (exact or matches)[0]
        labels = [view.label for view in self.commits]
        if matches:
            raise DataError(f"{name!r} is ambiguous: {', '.join(view.label for view in matches[:5])}")
        raise DataError(f"no benchmark result of commit {name!r}{did_you_mean(name, labels)}")

    def compare(self, baseline: str, target: str) -> BenchComparison:
        """The comparison of two commits, each by its name or the beginning of it. Raises DataError."""
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
    """Four significant digits, and no fraction from 1000 on: ``0.01234``, ``98.77``, ``12,346``."""
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
    size = max(change, 1 / (1 + change) - 1)  # +100 % and -50 % are the same distance
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
    """A short hash is the one longer hash that begins with it."""
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
    """``batch 8`` before ``batch 16``."""
    digits = "".join(char for char in config.load if char.isdigit())[:9]
    return config.model, config.hardware, config.variant, config.tool, (int(digits or 0), config.load), config.workload
