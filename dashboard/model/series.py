"""Series over steps of a site, a finding or the whole run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tapscope.core.formatting import block, count, duration, number, size
from tapscope.dashboard.model.run_data import RunData
from tapscope.dashboard.model.spans import even_spans
from tapscope.run_format.record import Record

if TYPE_CHECKING:
    from tapscope.comparator import Finding


_COUNTS = ("batch_size", "dropped", "records")


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    """Value of a series in one step; the maximum if the step has several values."""

    step: int
    value: float | None
    """None if not finite."""
    text: str = ""
    """The value as text: ``1.1e+00``, or ``not finite``."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart."""

    name: str
    """``rms``, ``|max|``, ``error ÷ floor``, or the name of a metric."""
    rank: int | None
    """None for a series over all ranks."""
    points: tuple[SeriesPoint, ...]
    """In order of steps."""
    text: str
    """Summary of the values: ``1.0e-01 to 2.3e+00, last 1.1e+00``."""


@dataclass(frozen=True, slots=True)
class SiteSeries:
    """All series of a site, a finding, or a run."""

    title: str
    series: tuple[Series, ...]


def site_series(source: RunData, site: str) -> SiteSeries:
    """Return rms and |max| of a site by step, one series per rank that recorded the site."""
    records = [record for record in source.of_site(site) if record.stats is not None]
    series: list[Series] = []
    readings: tuple[tuple[str, Callable[[Record], float | None]], ...] = (("rms", _rms), ("|max|", _absmax))
    for name, read in readings:
        for rank in sorted({record.key.rank for record in records}):
            values = [(record.key.step, read(record)) for record in records if record.key.rank == rank]
            series.append(series_of(name, rank, values))
    return SiteSeries(site, tuple(series))


def metric_series(source: RunData) -> SiteSeries:
    """Return the run's metrics by step, one series per rank that reported them."""
    values: dict[tuple[str, int], list[tuple[int, float | None]]] = {}
    for rank in source.ranks:
        for metric in source.run.metrics(rank):
            values.setdefault((metric.name, rank), []).append((metric.step, float(metric.value)))
    return SiteSeries("metrics", tuple(series_of(name, rank, own) for (name, rank), own in sorted(values.items())))


def finding_series(finding: "Finding") -> SiteSeries:
    """Return the largest row error ÷ floor, and the largest difference, by target step."""
    steps, floor = finding.steps, finding.row_floor
    series = [series_of("max |Δ|", None, [(each.step, each.max_abs) for each in steps])]
    if floor > 0.0:
        series.insert(0, series_of("error ÷ floor", None, [(each.step, each.error / floor) for each in steps]))
    else:
        series.insert(0, series_of("error", None, [(each.step, each.error) for each in steps]))
    return SiteSeries(finding.site, tuple(series))


def value_text(name: str) -> Callable[[float | None], str]:
    """Return the formatter of a metric, chosen by the unit in its name.

    Examples: ``58 MB``, ``45 ms``, ``1,132``, ``45 %``; ``2.5e-01`` without a known unit.
    """
    if name.endswith("_bytes"):
        return lambda value: "-" if value is None else size(value)
    if name.endswith("_s") and not name.endswith("_per_s"):
        return lambda value: "-" if value is None else duration(value)
    if name.endswith("_usage"):
        return lambda value: "-" if value is None else f"{100 * value:.1f} %"
    if name in _COUNTS or name.startswith(("num_", "kv_pages_")):
        return lambda value: "-" if value is None else count(round(value))
    return number


def sparkline(series: Series, cells: int) -> str:
    """Draw a series as blocks from 0 to its largest magnitude; adjacent steps merge by maximum, ``%`` marks non-finite
    values."""
    top = max((abs(each.value) for each in series.points if each.value is not None), default=0.0)
    line = ""
    for a, b in even_spans(len(series.points), cells):
        values = [each.value for each in series.points[a:b]]
        line += "%" if None in values else block(max(abs(v) for v in values if v is not None), top)
    return line


def series_of(
    name: str,
    rank: int | None,
    values: Sequence[tuple[int, float | None]],
) -> Series:
    """Build a series from (step, value) pairs with the maximum of each step; non-finite values take precedence."""
    formatted = value_text(name)
    largest: dict[int, float | None] = {}
    for step, value in values:
        kept = value if value is not None and math.isfinite(value) else None
        before = largest.get(step, -math.inf)
        largest[step] = None if kept is None or before is None else max(before, kept)
    points = tuple(
        SeriesPoint(step, value, "not finite" if value is None else formatted(value))
        for step, value in sorted(largest.items())
    )
    finite = [each.value for each in points if each.value is not None]
    num_bad = len(points) - len(finite)
    text = (
        f"{formatted(min(finite))} to {formatted(max(finite))}, last {formatted(points[-1].value)}" if finite else "-"
    )
    if num_bad:
        text += f", not finite in {num_bad:,} of {len(points):,} steps"
    return Series(name, rank, points, text)


def _rms(record: Record) -> float | None:
    stats = record.stats
    return None if stats is None or stats.nonfinite else stats.rms


def _absmax(record: Record) -> float | None:
    stats = record.stats
    return None if stats is None or stats.nonfinite else stats.absmax
