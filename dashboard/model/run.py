"""RunView: one run: what it holds, and the magnitude of every site in every step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tapscope.core.formatting import number, shape
from tapscope.dashboard.model.fact import Fact
from tapscope.dashboard.model.grid import PackedGrid
from tapscope.dashboard.model.grid_levels import GridLevel, grid_level
from tapscope.dashboard.model.magnitudes import MAX_COLUMNS, MEASURES, magnitudes_of
from tapscope.dashboard.model.run_data import RunData
from tapscope.render.anomalies import anomaly_of
from tapscope.run_format.record import Record

MAX_ROWS = 5_000
MAX_CELLS = 200_000
MAX_MEASURED = 10_000_000
"""Cells of all sites, from which those of a level are joined."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run in a list."""

    id: str
    name: str
    path: str
    model: str
    framework: str
    created: str
    is_open: bool
    problem: str
    """Why it has nothing to show, in one word or two; empty for a run with records."""


@dataclass(frozen=True, slots=True)
class AnomalyPlace:
    """A record that is not finite."""

    site: str
    step: int
    rank: int
    detail: str
    """What it holds, e.g. ``2 nan, 1 inf``."""


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as a page shows it."""

    id: str
    name: str
    facts: tuple[str, ...]
    state: str
    missing: tuple[str, ...]
    account: str
    """What the run holds, as text."""
    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    num_anomalies: int
    first_nonfinite: AnomalyPlace | None
    """The first record that is not finite in the earliest step; of several ranks that of the lowest."""
    num_sites: int
    measure: str
    """What the heat map shows, one of ``measures``."""
    magnitudes: PackedGrid
    """Sites × steps: glyphs ``1`` to ``9`` from the run's smallest to its largest on a log scale, ``∅`` for zero; of
    magnitudes ``%`` for a value that is not finite."""
    measures: tuple[str, ...] = MEASURES


@dataclass(frozen=True, slots=True)
class RecordRow:
    """A record in a list."""

    site: str
    key: str
    """Identifies the record within its step and rank."""
    dtype: str
    shape: str
    facts: tuple[Fact, ...]
    anomaly: str


@dataclass(frozen=True, slots=True)
class RecordPage:
    """A part of a list of records."""

    records: tuple[RecordRow, ...]
    offset: int
    num_records: int
    """Of the whole list."""


@dataclass(frozen=True, slots=True)
class RankRecord:
    """A record with its rank."""

    rank: int
    record: RecordRow


@dataclass(frozen=True, slots=True)
class CellRecords:
    """The records behind a cell of the heat map: the records of its site in its most conspicuous step."""

    site: str
    step: int
    records: tuple[RankRecord, ...]


def run_view(
    source: RunData,
    run_id: str,
    *,
    rank: int | None = None,
    measure: str = MEASURES[0],
    max_columns: int = MAX_COLUMNS,
) -> RunView:
    """``rank`` restricts the heat map to one rank; ``measure`` is one of MEASURES. Raises ConfigError."""
    header = source.header
    return RunView(
        id=run_id,
        name=header.name,
        facts=header.facts,
        state=header.state,
        missing=header.missing,
        account=source.account().plain,
        steps=source.steps,
        ranks=source.ranks,
        num_anomalies=source.num_anomalies,
        first_nonfinite=_first_nonfinite(source),
        num_sites=source.num_sites,
        measure=measure,
        magnitudes=magnitude_grid(source, rank, max_columns, measure),
    )


def _first_nonfinite(source: RunData) -> AnomalyPlace | None:
    places, records = source.nonfinite_places, source.run.records
    if not len(places):
        return None
    record = records[int(places[np.argmin(records.step[places])])]
    anomaly, key = anomaly_of(record), record.key
    return AnomalyPlace(key.site, key.step, key.rank, "" if anomaly is None else anomaly.detail)


def magnitude_grid(
    source: RunData,
    rank: int | None = None,
    max_columns: int = MAX_COLUMNS,
    measure: str = MEASURES[0],
    within: tuple[int, int] | None = None,
) -> PackedGrid:
    """The largest measure by site and step; steps beyond ``max_columns`` are joined by their maximum.

    Of more than MAX_ROWS sites those that are not finite are kept first. ``within`` as in :func:`magnitudes_of`.
    Raises ConfigError.
    """
    num_rows = max(min(source.num_sites, MAX_ROWS), 1)
    grid = magnitudes_of(source, rank, max(min(max_columns, MAX_CELLS // num_rows), 1), measure, within)
    bad = np.array([row.verdict.is_bad for row in grid.rows], np.bool_)
    return grid.selected(np.sort(np.argsort(~bad, kind="stable")[:MAX_ROWS]).tolist()).packed()


def magnitude_level(
    source: RunData, at: Sequence[int], rank: int | None, measure: str, within: tuple[int, int] | None = None
) -> GridLevel:
    """A level of the heat map, see :func:`grid_level`. Raises ConfigError."""
    most = max(min(MAX_COLUMNS, MAX_MEASURED // max(source.num_sites, 1)), 1)
    return grid_level(magnitudes_of(source, rank, most, measure, within), at, most)


def record_page(records: Sequence[Record], offset: int = 0, limit: int = 2000) -> RecordPage:
    """A part of the records of one step and rank."""
    return RecordPage(tuple(map(_record_row, records[offset : offset + limit])), offset, len(records))


def cell_records(source: RunData, site: str, first: int, last: int, rank: int | None = None) -> CellRecords:
    """The records of a site in the step, of those from ``first`` to ``last``, in which it is most conspicuous."""
    records = [each for each in source.of_site(site, rank=rank) if first <= each.key.step <= last]
    step = min(records, key=_most_conspicuous).key.step if records else first
    rows = tuple(RankRecord(r.key.rank, _record_row(r)) for r in records if r.key.step == step)
    return CellRecords(site, step, rows)


def _most_conspicuous(record: Record) -> tuple[bool, float, int]:
    """Values that are not finite first, then the largest magnitude, then the earliest step."""
    stats, anomaly = record.stats, anomaly_of(record)
    is_bad = anomaly is not None and anomaly.kind == "nonfinite"
    return not is_bad, -((stats.absmax or 0.0) if stats else 0.0), record.key.step


def record_key(record: Record) -> str:
    """``micro.pass.occurrence``: with site, step and rank it names one record."""
    key = record.key
    return f"{key.micro}.{key.pass_}.{key.occurrence}"


def _record_row(record: Record) -> RecordRow:
    stats, anomaly = record.stats, anomaly_of(record)
    facts = (Fact("|max|", number(stats.absmax)), Fact("rms", number(stats.rms))) if stats else ()
    return RecordRow(
        record.key.site,
        record_key(record),
        record.dtype or "value",
        shape(record.shape),
        facts,
        anomaly.detail if anomaly else "",
    )
