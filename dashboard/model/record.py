"""View of one recorded tensor."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rich.text import Text

from tapscope.core.formatting import count, number
from tapscope.dashboard.model.permalink import Permalink
from tapscope.render import record_text
from tapscope.render.row_labels import row_map
from tapscope.render.tensor_summary import Corner, Digest, Histogram, digest
from tapscope.run_format.record import Record
from tapscope.run_format.run import Run

_WIDE = 1_000_000
"""Line width that disables wrapping, because the front end wraps lines itself."""
STRIP_CELLS = 200


@dataclass(frozen=True, slots=True)
class Bin:
    """One bin of a histogram."""

    low: float
    high: float
    count: int
    text: str
    """Edges and count: ``-1.20e-01 … 3.40e-01: 1,132``."""
    share: float
    """Height on a log scale, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class RowCell:
    """Largest |x| of a row, or of several adjacent rows."""

    share: float | None
    """|x| ÷ the largest |x| of all rows, from 0 to 1; None if a value is non-finite."""
    text: str


@dataclass(frozen=True, slots=True)
class ValueTile:
    """Rectangle of formatted values; rows are token rows if known, else indices of the first axis."""

    first_row: int
    first_column: int
    num_rows: int
    num_columns: int
    labels: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class RecordView:
    """A recorded tensor: description, statistics, and a part of its values."""

    site: str
    title: str
    """Step, rank, phase and unusual properties of the record."""
    facts: tuple[str, ...]
    statistics: tuple[str, ...]
    histogram: tuple[Bin, ...]
    rows: tuple[RowCell, ...]
    tile: ValueTile | None
    around_nonfinite: ValueTile | None
    notes: tuple[str, ...]
    link: str


def record_view(run: Run, record: Record, firings: int = 1) -> RecordView:
    """Read the values of a record and build its view. Raises RunCorruptError."""
    line = run.steps.get(record.key.step, {}).get(record.key.rank)
    rows = row_map(record, line)
    summary = digest(run.array(record), rows) if record.entry is not None else None
    facts = [*record_text.what_lines(record, rows, _WIDE), *record_text.digest_lines(record, _WIDE)]
    notes = [] if summary is not None else [record_text.no_values_text(record)]
    notes += ["complex values are shown as magnitudes"] if summary is not None and summary.is_magnitude else []
    notes += _plain(record_text.bad_lines(summary)) if summary is not None else []
    key = record.key
    return RecordView(
        site=key.site,
        title=" · ".join(record_text.title_facts(record, firings, line.info.phase if line else "")),
        facts=tuple(_plain(facts)),
        statistics=tuple(_plain(record_text.stats_lines(record, _WIDE))) if record.dtype else (),
        histogram=tuple(_bins(summary.histogram)) if summary and summary.histogram else (),
        rows=tuple(_rows(summary)) if summary else (),
        tile=_tile(summary.corner, summary) if summary else None,
        around_nonfinite=_tile(summary.around_bad, summary) if summary and summary.around_bad is not None else None,
        notes=tuple(notes),
        link=str(Permalink(run.name, key.site, key.step, key.rank)),
    )


def _plain(lines: Iterable[Text]) -> list[str]:
    return [line.plain for line in lines if line.plain]


def _bins(histogram: Histogram) -> Iterable[Bin]:
    top = math.log1p(max(histogram.counts, default=0)) or 1.0
    for i, num in enumerate(histogram.counts):
        low, high = histogram.edges(i)
        yield Bin(low, high, num, f"{low:.2e} … {high:.2e}: {count(num)}", math.log1p(num) / top)


def _rows(summary: Digest) -> Iterable[RowCell]:
    strip = summary.strip.shrink(STRIP_CELLS)
    top = max(strip.peaks, default=0.0)
    for peak, bad in zip(strip.peaks, strip.bad, strict=True):
        yield RowCell(None if bad else peak / top if top else 0.0, "not finite" if bad else number(peak))


def _tile(corner: Corner | None, summary: Digest) -> ValueTile | None:
    if corner is None:
        return None
    numbers = range(corner.first_row, corner.first_row + len(corner.values))
    labels = tuple(summary.rows.label(row) if summary.rows else str(row) for row in numbers)
    values = tuple(tuple(record_text.value_text(value) for value in line) for line in corner.values)
    return ValueTile(corner.first_row, corner.first_column, corner.num_rows, corner.num_columns, labels, values)
