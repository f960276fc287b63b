"""View of one run: contents, and the magnitude of every site in every step."""

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
"""Maximum number of site × step cells from which a level of the heat map is merged."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Entry of a run in a list of runs."""

    id: str
    name: str
    path: str
    model: str
    framework: str
    created: str
    is_open: bool
    problem: str
    """Reason why the run cannot be shown, in one or two words; empty for a run with records."""


@dataclass(frozen=True, slots=True)
class AnomalyPlace:
    """Place of a record with non-finite values."""

    site: str
    step: int
    rank: int
    detail: str
    """Counts of its values, e.g. ``2 nan, 1 inf``."""


@dataclass(frozen=True, slots=True)
class RunView:
    """Content of a run's web page."""

    id: str
    name: str
    facts: tuple[str, ...]
    state: str
    missing: tuple[str, ...]
    account: str
    """Summary of the run as text."""
    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    num_anomalies: int
    first_nonfinite: AnomalyPlace | None
    """The first record with non-finite values in the earliest step, on the lowest rank."""
    num_sites: int
    measure: str
    """Measure of the heat map, one of ``measures``."""
    magnitudes: PackedGrid
    """Heat map of sites × steps: ``1`` to ``9`` on a log scale from the run's smallest to its largest measure.

    ``∅`` is zero; ``%`` marks non-finite values, for magnitudes only.
    """
    measures: tuple[str, ...] = MEASURES


@dataclass(frozen=True, slots=True)
class RecordRow:
    """Entry of a record in a list of records."""

    site: str
    key: str
    """Identifies the record within its site, step and rank, see :func:`record_key`."""
    dtype: str
    shape: str
    facts: tuple[Fact, ...]
    anomaly: str


@dataclass(frozen=True, slots=True)
class RecordPage:
    """Page of a list of records."""

    records: tuple[RecordRow, ...]
    offset: int
    num_records: int
    """Length of the whole list."""


@dataclass(frozen=True, slots=True)
class RankRecord:
    """A record with its rank."""

    rank: int
    record: RecordRow


@dataclass(frozen=True, slots=True)
class CellRecords:
    """Records of a heat-map cell: the records of its site in the most anomalous step of the cell."""

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
    """Build the view of a run. ``rank`` restricts the heat map to one rank; ``measure`` is one of MEASURES.

    Raises ConfigError for an unknown measure.
    """
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
    """Return the largest measure by site and step; steps beyond ``max_columns`` are binned by maximum.

    At most MAX_ROWS sites are returned; sites with non-finite values take precedence. ``within`` as in
    :func:`magnitudes_of`. Raises ConfigError.
    """
    num_rows = max(min(source.num_sites, MAX_ROWS), 1)
    grid = magnitudes_of(source, rank, max(min(max_columns, MAX_CELLS // num_rows), 1), measure, within)
    bad = np.array([row.verdict.is_bad for row in grid.rows], np.bool_)
    return grid.selected(np.sort(np.argsort(~bad, kind="stable")[:MAX_ROWS]).tolist()).packed()


def magnitude_level(
    source: RunData, at: Sequence[int], rank: int | None, measure: str, within: tuple[int, int] | None = None
) -> GridLevel:
    """Return one level of the heat map, see :func:`grid_level`. Raises ConfigError."""
    most = max(min(MAX_COLUMNS, MAX_MEASURED // max(source.num_sites, 1)), 1)
    return grid_level(magnitudes_of(source, rank, most, measure, within), at, most)


def record_page(records: Sequence[Record], offset: int = 0, limit: int = 2000) -> RecordPage:
    """Return the page of ``records`` that starts at ``offset``."""
    return RecordPage(tuple(map(_record_row, records[offset : offset + limit])), offset, len(records))


def cell_records(source: RunData, site: str, first: int, last: int, rank: int | None = None) -> CellRecords:
    """Return the records of a site in the most anomalous step from ``first`` to ``last``, inclusive."""
    records = [each for each in source.of_site(site, rank=rank) if first <= each.key.step <= last]
    step = min(records, key=_most_conspicuous).key.step if records else first
    rows = tuple(RankRecord(r.key.rank, _record_row(r)) for r in records if r.key.step == step)
    return CellRecords(site, step, rows)


def _most_conspicuous(record: Record) -> tuple[bool, float, int]:
    """Sort key: non-finite values first, then the largest magnitude, then the earliest step."""
    stats, anomaly = record.stats, anomaly_of(record)
    is_bad = anomaly is not None and anomaly.kind == "nonfinite"
    return not is_bad, -((stats.absmax or 0.0) if stats else 0.0), record.key.step


def record_key(record: Record) -> str:
    """Return ``micro.pass.occurrence``, which with site, step and rank identifies a record."""
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
