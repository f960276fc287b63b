"""Heat map of one run, sites or layers × steps, by one of several measures of magnitude."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import numpy as np

from tapscope.comparator import Verdict
from tapscope.core import dtypes
from tapscope.core.errors import ConfigError
from tapscope.core.formatting import count, number
from tapscope.dashboard.model.grid import CODES, Cell, Grid, GridColumn, GridRow, PackedGrid, PackedRow
from tapscope.dashboard.model.level import LevelScale
from tapscope.dashboard.model.run_data import RunData
from tapscope.dashboard.model.spans import even_spans
from tapscope.run_format.records import Records

Array = np.ndarray[Any, Any]

MEASURES = ("|max|", "rms", "not finite", "zeros")
"""Measures of a cell: largest magnitude, rms, and the number of non-finite or zero values."""
MAX_COLUMNS = 500
_MAGNITUDES = MEASURES[:2]
_ZERO = "∅"


@dataclass(frozen=True, slots=True)
class MagnitudeCell(Cell):
    """Cell of a run's heat map; :attr:`ratio` is its measure."""

    scale: LevelScale = field(default_factory=LevelScale)
    """Scale of the run's measures, excluding the sites in :attr:`MagnitudeGrid.aside`."""
    shows_nonfinite: bool = True
    """Whether non-finite values take precedence over the measure of the finite ones."""

    @property
    def glyph(self) -> str:
        """``1`` to ``9`` on a log scale from the run's smallest to its largest measure.

        ``∅`` is zero, ``%`` non-finite unless the measure is a count, ``·`` without statistics.
        """
        is_bad = self.shows_nonfinite and self.verdict is Verdict.NONFINITE
        return self.scale.glyph(self.ratio, bad=is_bad, zero=_ZERO)

    @property
    def text(self) -> str:
        """The measure as text; ``-`` without statistics."""
        return _text(self.ratio, is_count=not self.shows_nonfinite)


@dataclass(frozen=True, eq=False, slots=True)
class MagnitudeGrid(Grid):
    """A :class:`.Grid` whose ``ratios`` are the measure, and whose only bad verdict is ``nonfinite``."""

    measure: str = MEASURES[0]
    scale: LevelScale = field(default_factory=LevelScale)
    aside: frozenset[str] = frozenset()
    """Sites without comparable measures, which merged rows ignore: masks and, for magnitudes, integers such as token
    ids.

    Their NaN and infinity still count, and so do their measures if a row has no other sites.
    """

    def grouped(self, rows: Sequence[GridRow]) -> Self:
        """Merge rows as :meth:`.Grid.grouped` does, ignoring the measures of the sites in :attr:`aside`."""
        every = Grid.grouped(self, rows)
        kept = [replace(row, orders=tuple(self._counted(row.orders))) for row in rows]
        if all(len(row.orders) == len(few.orders) for row, few in zip(rows, kept, strict=True)):
            return every
        return replace(every, ratios=Grid.grouped(self, kept).ratios)

    def _counted(self, rows: Sequence[int]) -> Sequence[int]:
        counted = [i for i in rows if self.rows[i].name not in self.aside] if self.aside else ()
        return counted or rows

    def cell(self, row: int, column: int) -> MagnitudeCell:
        """Return the cell at ``row`` and ``column``."""
        verdict = Verdict.NONFINITE if self.codes[row, column] else Verdict.SAME
        return MagnitudeCell(verdict, float(self.ratios[row, column]), self.scale, self.shows_nonfinite)

    @property
    def shows_nonfinite(self) -> bool:
        """Whether non-finite values take precedence over the measure; False for counts."""
        return self.measure in _MAGNITUDES

    def largest(self, rows: Sequence[int], column: int | None = None) -> tuple[int, int] | None:
        """Return (row, column) of the largest measure in ``rows``, in one column or in all; the first one on ties.

        Non-finite values rank first unless the measure is a count. None if there are no statistics.
        """
        columns = slice(None) if column is None else slice(column, column + 1)
        values, codes = (each[list(rows), columns] for each in (self.ratios, self.codes))
        counted = set(self._counted(rows))
        known = ~np.isnan(values) & np.array([[i in counted] for i in rows], bool).reshape(-1, 1)
        bad = (codes > 0) & self.shows_nonfinite
        if not (known | bad).any():
            return None
        ranked = np.where(known, values, -np.inf)
        place = int(np.argmax(np.where(bad, ranked, -np.inf) if bad.any() else ranked))
        if bad.any() and not bad.ravel()[place]:  # no non-finite cell has a measure
            place = int(np.argmax(bad))
        row, at = divmod(place, values.shape[1])
        return rows[row], at + (column or 0)

    def packed(self) -> PackedGrid:
        """Return compact JSON for a page: the measures of a row, separated by spaces."""
        glyphs = self.scale.glyphs(self.ratios, (self.codes > 0) & self.shows_nonfinite, _ZERO)
        text = partial(_text, is_count=not self.shows_nonfinite)
        rows = [
            PackedRow(row.label, "nonfinite" if row.verdict.is_bad else "", row.verdict.is_bad, line, " ".join(shown))
            for row, line, shown in zip(
                self.rows, glyphs, (map(text, each) for each in self.ratios.tolist()), strict=True
            )
        ]
        return PackedGrid(tuple((each.first, each.last) for each in self.columns), tuple(rows))


def magnitudes_of(
    source: RunData,
    rank: int | None = None,
    max_columns: int = MAX_COLUMNS,
    measure: str = MEASURES[0],
    within: tuple[int, int] | None = None,
) -> MagnitudeGrid:
    """Return the largest measure per site and step, over all ranks or of one; sites are in order of first records.

    Steps beyond ``max_columns`` are binned by maximum. ``within`` restricts the columns to an inclusive range of steps;
    rows and scale remain those of all steps. Raises ConfigError for an unknown measure, or a range without steps.
    """
    if measure not in MEASURES:
        raise ConfigError(f"invalid measure {measure!r}: expected {', '.join(MEASURES)}")
    every = _measured_grid(source, rank, max_columns, measure, source.steps)
    if within is None:
        return every
    steps = [step for step in source.steps if within[0] <= step <= within[1]]
    if not steps:
        raise ConfigError(f"no step from {within[0]} to {within[1]} in the run")
    return replace(_measured_grid(source, rank, max_columns, measure, steps), rows=every.rows, scale=every.scale)


def _measured_grid(
    source: RunData, rank: int | None, max_columns: int, measure: str, steps: Sequence[int]
) -> MagnitudeGrid:
    records, (sites, site_of) = source.run.records, source.site_numbers
    spans = even_spans(len(steps), max_columns)
    bins = np.searchsorted([steps[a] for a, _ in spans], records.step, side="right") - 1
    tops, codes = np.full((len(sites), len(spans)), np.nan), np.zeros((len(sites), len(spans)), np.uint8)
    ours = records.of_kinds(lambda kind: rank in (None, kind.rank)).astype(bool)
    shown = ours & (records.step >= steps[0]) & (records.step <= steps[-1]) if steps else ours
    np.fmax.at(tops, (site_of[shown], bins[shown]), _measured(records, measure)[shown])
    nonfinite = source.nonfinite_places[shown[source.nonfinite_places]]
    codes[site_of[nonfinite], bins[nonfinite]] = CODES[Verdict.NONFINITE]
    numbers, firsts = np.unique(site_of[ours], return_index=True)
    in_order = numbers[np.argsort(firsts)]
    tops, codes, names = tops[in_order], codes[in_order], [sites[i] for i in in_order.tolist()]
    columns = tuple(GridColumn(steps[a], steps[b - 1]) for a, b in spans)
    is_whole = records.of_kinds(lambda kind: kind.dtype is not None and not dtypes.is_float(kind.dtype)).astype(bool)
    integers = set(site_of[is_whole].tolist()) if measure in _MAGNITUDES else set()
    is_aside = [i in integers or "mask" in name.lower() for i, name in zip(in_order.tolist(), names, strict=True)]
    scale = LevelScale.of(tops if all(is_aside) else tops[~np.array(is_aside, bool)])
    aside = frozenset(name for name, is_ignored in zip(names, is_aside, strict=True) if is_ignored)
    rows = _rows(names, codes.any(1))
    return MagnitudeGrid(rows, columns, tops, codes, measure=measure, scale=scale, aside=aside)


def _rows(names: Sequence[str], is_bad: Array) -> tuple[GridRow, ...]:
    verdicts = (Verdict.NONFINITE if bad else Verdict.SAME for bad in is_bad.tolist())
    return tuple(
        GridRow(name, name, verdict, (i,)) for i, (name, verdict) in enumerate(zip(names, verdicts, strict=True))
    )


def _measured(records: Records, measure: str) -> Array:
    """Return [records] float64: the measure of each record; nan without statistics."""
    if measure in _MAGNITUDES:
        return records.absmax if measure == "|max|" else records.rms
    counts = records.counts.astype(np.float64)
    columns = {"not finite": counts[:, 1:4].sum(1), "zeros": counts[:, 4]}
    values = np.where(counts[:, 0] > 0, columns[measure], np.nan)
    names = {"not finite": "nonfinite", "zeros": "zeros"}
    for place in records.irregular_places:
        stats = records[place].stats
        value = getattr(stats, names[measure]) if stats is not None else None
        values[place] = np.nan if value is None else value
    return values


def _text(measure: float, *, is_count: bool) -> str:
    if math.isnan(measure):
        return "-"
    return count(round(measure)) if is_count else number(measure)
