"""View of a run that is being recorded, in its current state or as of an earlier step."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from tapscope.core.formatting import count, printable, size
from tapscope.dashboard.model.fact import Fact
from tapscope.dashboard.model.series import Series, SiteSeries, series_of

_FIRST = ("queue_bytes", "latency_s", "kv_cache_usage", "batch_size", "num_tokens")
STATES = {
    "recording": "RECORDING",
    "closed": "CLOSED",
    "dead": "DEAD: the recorder ended without closing the run",
}


@dataclass(frozen=True, slots=True)
class LivePoint:
    """A finished step, with the cumulative counts at its end."""

    step: int
    num_steps: int
    num_records: int
    num_dropped: int
    num_nonfinite: int
    """Number of records with non-finite values."""
    values: dict[str, float | None]
    """Metrics of the step, the maximum over all ranks; null if not finite."""


@dataclass(frozen=True, slots=True)
class LiveAnomaly:
    """A record with non-finite values."""

    step: int
    rank: int
    site: str

    @property
    def text(self) -> str:
        """Site, step and rank as text."""
        return f"{self.site} step {self.step} rank {self.rank}"


@dataclass(frozen=True, slots=True)
class LiveView:
    """State of a run that is being recorded."""

    number: int
    """Counter that increases with every change; the id of the server-sent event."""
    state: str
    """``recording``, ``closed``, or ``dead`` if the recorder released its lock without closing the run."""
    num_records: int
    num_steps: int
    last_step: int | None
    num_dropped: int
    num_nonfinite: int
    records_per_s: float | None
    """Null in the view of an earlier step."""
    bytes_unread: int
    anomalies: tuple[LiveAnomaly, ...]
    """The latest records with non-finite values."""
    first_anomaly: LiveAnomaly | None
    """The first record with non-finite values in the earliest step."""
    points: tuple[LivePoint, ...]
    """The latest finished steps, in order."""


@dataclass(frozen=True, slots=True)
class LivePage:
    """Content of the web page of a live run, in its current state or as of an earlier step."""

    name: str
    """Name of the run."""
    view: LiveView
    """The state of the run, without its points."""
    state: str
    """State for the user, such as ``RECORDING``."""
    facts: tuple[Fact, ...]
    series: tuple[Series, ...]
    steps: tuple[int, ...]
    """Steps that :func:`live_page` accepts, in order."""


def live_page(view: LiveView, name: str, step: int | None = None) -> LivePage:
    """Build the page of a run in its current state, or as of ``step``. Raises ValueError for a step before all kept
    ones."""
    shown = view if step is None else view_at(view, step)
    steps = tuple(point.step for point in view.points)
    series, state = live_series(shown).series, STATES[view.state]
    return LivePage(printable(name), replace(shown, points=()), state, live_facts(shown), series, steps)


def view_at(view: LiveView, step: int) -> LiveView:
    """Return the state as of ``step``, or of the last kept step before. Raises ValueError for a step before all kept
    ones."""
    points = tuple(point for point in view.points if point.step <= step)
    if not points:
        why = f"the oldest kept step is {view.points[0].step}" if view.points else "no step has been recorded"
        raise ValueError(f"invalid step {step}: {why}")
    last = points[-1]
    return replace(
        view,
        num_records=last.num_records,
        num_steps=last.num_steps,
        last_step=last.step,
        num_dropped=last.num_dropped,
        num_nonfinite=last.num_nonfinite,
        records_per_s=None,
        bytes_unread=0,
        anomalies=tuple(each for each in view.anomalies if each.step <= last.step),
        first_anomaly=view.first_anomaly if view.first_anomaly and view.first_anomaly.step <= last.step else None,
        points=points,
    )


def live_facts(view: LiveView) -> tuple[Fact, ...]:
    """Return counts and rates of the run as text."""
    first = f", first {printable(view.first_anomaly.text)}" if view.first_anomaly is not None else ""
    rate = "-" if view.records_per_s is None else count(round(view.records_per_s))
    return (
        Fact("finished steps", count(view.num_steps)),
        Fact("last step", "-" if view.last_step is None else str(view.last_step)),
        Fact("records", count(view.num_records)),
        Fact("records/s", rate),
        Fact("dropped", count(view.num_dropped)),
        Fact("not finite", f"{count(view.num_nonfinite)}{first}"),
        Fact("not read yet", size(view.bytes_unread) if view.bytes_unread else "nothing"),
    )


def live_series(view: LiveView) -> SiteSeries:
    """Return series of records and drops per step, and of all metrics; queue, latency and KV cache are listed first."""
    added: tuple[tuple[str, Callable[[LivePoint], int]], ...] = (
        ("records", lambda point: point.num_records),
        ("dropped", lambda point: point.num_dropped),
    )
    series = []
    # without the step before, the increment of the first point is unknown
    is_whole = bool(view.points) and view.points[0].num_steps == 1
    for name, total in added:
        totals = [total(point) for point in view.points]
        values = [
            (point.step, float(own - before))
            for point, own, before in zip(view.points, totals, (0, *totals), strict=False)
        ][0 if is_whole else 1 :]
        series += [series_of(name, None, values)] if any(value for _, value in values) else []
    metrics = [(point.step, _with_usage(point.values)) for point in view.points]
    names = dict.fromkeys(name for _, values in metrics for name in values)
    for name in sorted(names, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST)):
        series.append(series_of(name, None, [(step, values[name]) for step, values in metrics if name in values]))
    return SiteSeries("live", tuple(series))


def _with_usage(values: dict[str, float | None]) -> dict[str, float | None]:
    """Replace the KV cache's page counts by its usage from 0 to 1, because the total is constant."""
    used, total = values.get("kv_pages_used"), values.get("kv_pages_total")
    if used is None or not total:
        return values
    return {"kv_cache_usage": used / total} | {name: each for name, each in values.items() if name != "kv_pages_total"}


def largest(one: float | None, other: float | None) -> float | None:
    """Return the larger value of two ranks; None if either is not finite."""
    if one is None or other is None or not (math.isfinite(one) and math.isfinite(other)):
        return None
    return max(one, other)
