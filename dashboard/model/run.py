"""RunView: one run: what it holds, and the magnitude of every site in every step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tapscope.core.errors import ConfigError
from tapscope.core.formatting import number, shape
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.model.fact import Fact
from tapscope.dashboard.model.grid import PackedGrid, PackedRow
from tapscope.dashboard.model.level import level_glyph
from tapscope.dashboard.model.spans import even_spans
from tapscope.render.anomalies import anomaly_of
from tapscope.run_format.record import Record
from tapscope.run_format.records import Records

MEASURES = ("|max|", "rms", "not finite", "zeros")
"""Of the heat map of one run: the largest magnitude, the rms, and the number of values that are not finite or zero."""
MAX_ROWS = 5_000
MAX_CELLS = 200_000


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
    """What a cell of the heat map stands for: the records of its site in its most conspicuous step."""

    site: str
    step: int
    records: tuple[RankRecord, ...]


def run_view(
    source: RunSource, run_id: str, *, rank: int | None = None, measure: str = MEASURES[0], max_columns: int = 500
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
        num_sites=source.num_sites,
        measure=measure,
        magnitudes=magnitude_grid(source, rank, max_columns, measure),
    )


def magnitude_grid(
    source: RunSource, rank: int | None = None, max_columns: int = 500, measure: str = MEASURES[0]
) -> PackedGrid:
    """The largest measure by site and step; steps beyond ``max_columns`` are joined by their maximum.

    Of more than MAX_ROWS sites those that are not finite are kept first. Raises ConfigError for an unknown measure.
    """
    if measure not in MEASURES:
        raise ConfigError(f"invalid measure {measure!r}: expected {', '.join(MEASURES)}")
    records, (sites, site_of) = source.run.records, source.site_numbers
    max_columns = max(min(max_columns, MAX_CELLS // max(min(len(sites), MAX_ROWS), 1)), 1)
    spans = even_spans(len(source.steps), max_columns)
    bins = np.searchsorted([source.steps[a] for a, _ in spans], records.step, side="right") - 1
    tops, bad = np.full((len(sites), len(spans)), np.nan), np.zeros((len(sites), len(spans)), np.bool_)
    ours = records.of_kinds(lambda kind: rank in (None, kind.rank)).astype(bool)
    np.fmax.at(tops, (site_of[ours], bins[ours]), _measured(records, measure)[ours])
    odd = source.nonfinite_places[ours[source.nonfinite_places]]
    bad[site_of[odd], bins[odd]] = True
    shows_bad = measure in MEASURES[:2]  # a count of values is shown as a number
    columns = tuple((source.steps[a], source.steps[b - 1]) for a, b in spans)
    limits = _range(tops)
    numbers, firsts = np.unique(site_of[ours], return_index=True)
    in_order = numbers[np.argsort(firsts)]
    shown = np.sort(np.argsort(~bad[in_order].any(1), kind="stable")[:MAX_ROWS])
    return PackedGrid(
        columns, tuple(_row(sites[i], tops[i], bad[i], limits, shows_bad=shows_bad) for i in in_order[shown].tolist())
    )


def _measured(records: Records, measure: str) -> np.ndarray:
    """[records] float64: the measure of each; nan without statistics."""
    if measure == "|max|":
        return records.absmax
    counts = records.counts.astype(np.float64)
    finite = counts[:, 0] - counts[:, 1:4].sum(1)
    with np.errstate(all="ignore"):
        columns = {
            "rms": np.sqrt(np.maximum(records.sums[:, 4], 0.0) / finite),
            "not finite": counts[:, 1:4].sum(1),
            "zeros": counts[:, 4],
        }
    found = np.where(counts[:, 0] > 0, columns[measure], np.nan)
    names = {"rms": "rms", "not finite": "nonfinite", "zeros": "zeros"}
    for place in records.irregular_places:
        stats = records[place].stats
        value = getattr(stats, names[measure]) if stats is not None else None
        found[place] = np.nan if value is None else value
    return found


def record_page(records: Sequence[Record], offset: int = 0, limit: int = 2000) -> RecordPage:
    """A part of the records of one step and rank."""
    return RecordPage(tuple(map(_record_row, records[offset : offset + limit])), offset, len(records))


def cell_records(source: RunSource, site: str, first: int, last: int, rank: int | None = None) -> CellRecords:
    """The records of a site in the step, of those from ``first`` to ``last``, in which it is most conspicuous."""
    found = [each for each in source.of_site(site, rank=rank) if first <= each.key.step <= last]
    step = min(found, key=_most_conspicuous).key.step if found else first
    rows = tuple(RankRecord(r.key.rank, _record_row(r)) for r in found if r.key.step == step)
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


def _range(tops: np.ndarray) -> tuple[float, float]:
    positive = tops[np.isfinite(tops) & (tops > 0)]
    return (float(np.log10(positive.min())), float(np.log10(positive.max()))) if positive.size else (0.0, 0.0)


def _row(site: str, tops: np.ndarray, bad: np.ndarray, limits: tuple[float, float], *, shows_bad: bool) -> PackedRow:
    glyphs = "".join(
        level_glyph(float(top), limits, bad=bool(flag) and shows_bad, zero="∅")
        for top, flag in zip(tops, bad, strict=True)
    )
    values = " ".join("-" if math.isnan(top) else number(float(top)) for top in tops)
    verdict = "nonfinite" if bad.any() else ""
    return PackedRow(site, verdict, bool(bad.any()), glyphs, values)
