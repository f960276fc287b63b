"""LiveView: a run while it is recorded, as it is now or as it was after a step."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from tapscope.core.formatting import count, size
from tapscope.dashboard.model.fact import Fact
from tapscope.dashboard.model.series import Series, SiteSeries, series_of

STATES = {
    "recording": "RECORDING",
    "closed": "CLOSED",
    "dead": "DEAD: the recorder ended without closing the run",
}


@dataclass(frozen=True, slots=True)
class LivePoint:
    """A finished step, and what had been recorded up to its end."""

    step: int
    num_steps: int
    num_records: int
    num_dropped: int
    num_nonfinite: int
    """Records that hold values that are not finite."""
    values: dict[str, float | None]
    """Metrics of the step: the largest of all ranks; null if not finite."""


@dataclass(frozen=True, slots=True)
class LiveAnomaly:
    """A record that is not finite."""

    step: int
    text: str
    """Site, step and rank."""


@dataclass(frozen=True, slots=True)
class LiveView:
    """A run while it is recorded."""

    number: int
    """Goes up with every change; the id of the server-sent event."""
    state: str
    """``recording``, ``closed`` or ``dead``: the recorder no longer holds its lock and did not close the run."""
    num_records: int
    num_steps: int
    last_step: int | None
    num_dropped: int
    num_nonfinite: int
    records_per_s: float | None
    """Null for a step that is over."""
    bytes_unread: int
    anomalies: tuple[LiveAnomaly, ...]
    """The latest ones."""
    points: tuple[LivePoint, ...]
    """The latest steps, in order."""


@dataclass(frozen=True, slots=True)
class LivePage:
    """A run while it is recorded, as the web page draws it: now, or as it was after a step."""

    view: LiveView
    """Without its points."""
    state: str
    """In words."""
    facts: tuple[Fact, ...]
    series: tuple[Series, ...]
    steps: tuple[int, ...]
    """The steps that :func:`live_page` has, in order."""


def live_page(view: LiveView, step: int | None = None) -> LivePage:
    """The page of a run as it is now, or as it was after ``step``; raises ValueError."""
    shown = view if step is None else view_at(view, step)
    steps = tuple(point.step for point in view.points)
    return LivePage(replace(shown, points=()), STATES[view.state], live_facts(shown), live_series(shown).series, steps)


def view_at(view: LiveView, step: int) -> LiveView:
    """The run as it was after this step, or the last one before it among those that are kept; raises ValueError."""
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
        points=points,
    )


def live_facts(view: LiveView) -> tuple[Fact, ...]:
    """Numbers of the run as text."""
    rate = "-" if view.records_per_s is None else count(round(view.records_per_s))
    return (
        Fact("finished steps", count(view.num_steps)),
        Fact("last step", "-" if view.last_step is None else str(view.last_step)),
        Fact("records", count(view.num_records)),
        Fact("records/s", rate),
        Fact("dropped", count(view.num_dropped)),
        Fact("not finite", count(view.num_nonfinite)),
        Fact("to read", size(view.bytes_unread) if view.bytes_unread else "nothing"),
    )


def live_series(view: LiveView) -> SiteSeries:
    """Records and drops of each step, and the metrics."""
    added: tuple[tuple[str, Callable[[LivePoint], int]], ...] = (
        ("records", lambda point: point.num_records),
        ("dropped", lambda point: point.num_dropped),
    )
    found = []
    for name, total in added:
        values = [
            (point.step, float(total(point) - total(before)))
            for before, point in zip(view.points, view.points[1:], strict=False)
        ]
        found += [series_of(name, None, values, _count)] if any(value for _, value in values) else []
    for name in dict.fromkeys(name for point in view.points for name in point.values):
        known = [(point.step, point.values[name]) for point in view.points if name in point.values]
        found.append(series_of(name, None, known))
    return SiteSeries("live", tuple(found))


def _count(value: float | None) -> str:
    return "-" if value is None else count(round(value))


def largest(one: float | None, other: float | None) -> float | None:
    """Of two ranks; null if one is not finite."""
    if one is None or other is None or not (math.isfinite(one) and math.isfinite(other)):
        return None
    return max(one, other)
