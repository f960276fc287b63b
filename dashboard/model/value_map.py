"""ValueMap: the heat map of a whole table, with cells joined by their maximum."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tapscope.core.formatting import number
from tapscope.dashboard.model.elementwise import as_float64, magnitudes
from tapscope.dashboard.model.grid import PackedGrid, PackedRow
from tapscope.dashboard.model.level import LevelScale
from tapscope.dashboard.model.spans import even_spans
from tapscope.dashboard.model.value_table import ValueTable

Array = np.ndarray[Any, Any]

MAX_ROWS, MAX_COLUMNS = 256, 512
"""Most cells along each axis that are kept; a screen with fewer joins them."""


@dataclass(frozen=True, eq=False, slots=True)
class ValueMap:
    """Rectangles of a table: the largest |Δ| of a pair, or the largest |x| of one run, in each."""

    rows: tuple[tuple[int, int], ...]
    """First row and end of each line of cells."""
    columns: tuple[tuple[int, int], ...]
    peaks: Array
    """[lines, columns] float64: the largest finite one."""
    bad: Array
    """[lines, columns] bool: whether a value is not finite, of a pair on one side alone."""
    is_pair: bool

    def binned(self, num_rows: int, num_columns: int) -> "ValueMap":
        """At most that number of cells along each axis, each the maximum of those it joins; a bad one makes it bad."""
        rows, columns = even_spans(len(self.rows), num_rows), even_spans(len(self.columns), num_columns)
        peaks, bad = self.peaks, self.bad
        for axis, spans in enumerate((rows, columns)):
            starts = [a for a, _ in spans]
            if starts:
                peaks, bad = np.maximum.reduceat(peaks, starts, axis), np.logical_or.reduceat(bad, starts, axis)
        return ValueMap(
            tuple((self.rows[a][0], self.rows[b - 1][1]) for a, b in rows),
            tuple((self.columns[a][0], self.columns[b - 1][1]) for a, b in columns),
            peaks,
            bad,
            self.is_pair,
        )

    def glyphs(self) -> list[str]:
        """A line of cells as characters: ``1`` to ``9`` from the smallest to the largest on a log scale, ``%`` not
        finite, and for zero ``=`` (a pair) or ``∅``."""
        return LevelScale.of(self.peaks).glyphs(self.peaks, self.bad, "=" if self.is_pair else "∅")

    def text(self, line: int, column: int) -> str:
        """The value of a cell, as text."""
        return "not finite" if self.bad[line, column] else number(float(self.peaks[line, column]))

    def packed(self, table: ValueTable) -> PackedGrid:
        """As JSON, with the labels of the table's rows."""
        lines = [
            PackedRow(
                _range_text(table.label(first), table.label(end - 1) if end - 1 > first else ""),
                "nonfinite" if odd.any() else "",
                bool(odd.any()),
                glyphs,
                " ".join("-" if bad else number(peak) for peak, bad in zip(line.tolist(), odd.tolist(), strict=True)),
            )
            for (first, end), line, odd, glyphs in zip(self.rows, self.peaks, self.bad, self.glyphs(), strict=True)
        ]
        return PackedGrid(
            tuple((a, b - 1) for a, b in self.columns),
            tuple(lines),
            "column",
            (),
            tuple((a, b - 1) for a, b in self.rows),
        )


def value_map(table: ValueTable) -> ValueMap:
    """Reads all values once; raises RunCorruptError."""
    rows, columns = even_spans(table.num_rows, MAX_ROWS), even_spans(table.num_columns, MAX_COLUMNS)
    line_of = np.repeat(np.arange(len(rows)), [b - a for a, b in rows]) if rows else np.zeros(0, np.int64)
    starts = np.array([a for a, _ in columns], np.int64)
    peaks, bad = np.zeros((len(rows), len(columns))), np.zeros((len(rows), len(columns)), np.bool_)
    for row, left, right in table.chunks():
        sizes = magnitudes(left, right, is_pair=table.is_pair)
        with np.errstate(all="ignore"):
            finite = np.isfinite(as_float64(right))
            if table.is_pair:
                finite &= np.isfinite(as_float64(left))
        odd = ~finite & (sizes != 0.0) if table.is_pair else ~finite
        at, lines = starts[starts < sizes.shape[1]], line_of[row : row + len(sizes)]
        maxima = np.maximum.reduceat(np.where(finite, sizes, 0.0), at, axis=1)
        np.maximum.at(peaks[:, : len(at)], lines, maxima)
        np.logical_or.at(bad[:, : len(at)], lines, np.logical_or.reduceat(odd, at, axis=1))
    return ValueMap(tuple(rows), tuple(columns), peaks, bad, table.is_pair)


def _range_text(first: str, last: str) -> str:
    return f"{first} … {last}" if last else first
