"""Heat map of a whole value table, with cells merged by maximum."""

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
"""Maximum number of cells stored along each axis; a screen with less room merges them further."""


@dataclass(frozen=True, eq=False, slots=True)
class ValueMap:
    """Heat map over rectangles of a table: the largest |Δ| of a pair, or the largest |x| of a single run."""

    rows: tuple[tuple[int, int], ...]
    """First row, and end (exclusive), of each line of cells."""
    columns: tuple[tuple[int, int], ...]
    peaks: Array
    """[lines, columns] float64, the largest finite magnitude."""
    bad: Array
    """[lines, columns] bool, whether a value is non-finite; for a pair, on one side only."""
    is_pair: bool

    def binned(self, num_rows: int, num_columns: int) -> "ValueMap":
        """Merge cells to at most the given numbers, by maximum; a merged cell is bad if any of its cells is."""
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
        """Draw each line of cells as a string.

        ``1`` to ``9`` is a log scale from the smallest to the largest magnitude, ``%`` non-finite; zero is ``=`` for a
        pair and ``∅`` for a single run.
        """
        return LevelScale.of(self.peaks).glyphs(self.peaks, self.bad, "=" if self.is_pair else "∅")

    def text(self, line: int, column: int) -> str:
        """Return the value of a cell as text."""
        return "not finite" if self.bad[line, column] else number(float(self.peaks[line, column]))

    def packed(self, table: ValueTable) -> PackedGrid:
        """Return the heat map as compact JSON, with the labels of the table's rows."""
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
    """Compute the heat map in one pass over all values. Raises RunCorruptError."""
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
