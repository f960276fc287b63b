"""Table of the records of the chosen module, step and rank."""

from collections.abc import Sequence

import numpy as np
from rich.text import Text
from textual import events

from tapscope.core import dtypes
from tapscope.core.formatting import count, number, shape, size
from tapscope.core.formatting import site as shorten
from tapscope.dashboard.keymap import RECORDS
from tapscope.dashboard.module_tree import relative
from tapscope.dashboard.widgets.column_list import ColumnList
from tapscope.dashboard.widgets.row_list import column_at
from tapscope.render.anomalies import anomaly_of
from tapscope.render.record_notes import firing
from tapscope.run_format.record import Record
from tapscope.run_format.record_columns import Kind
from tapscope.run_format.records import Records

MIN_SITE = 28
"""Minimum width of the site; columns are dropped to preserve it."""

_DROPPED_FIRST = ("rank", "step", "dtype", "rms", "shape", "nan+inf")
_USUAL = ("step", "rank", "shape", "dtype", "rms", "|max|", "nan+inf")
_NUMBER_WIDTH = 8


class RecordTable(ColumnList):
    """Upper right pane of the browse screen."""

    COLUMNS = (*_USUAL, "mean", "min", "max", "zeros", "bytes")

    def __init__(self) -> None:
        super().__init__(RECORDS)
        self.records = Records()
        self._record: tuple[int, Record] | None = None
        self._path = ""
        self._heading = ("", "")
        self._widths: dict[str, int] = {}

    @property
    def record(self) -> Record | None:
        """The record under the cursor; the same object until the cursor moves."""
        if self._record is None or self._record[0] != self.cursor:
            self._record = (self.cursor, self.records[self.cursor]) if self.records else None
        return self._record[1] if self._record is not None else None

    def set_records(self, records: Records, path: str, cursor: int) -> None:
        """Show these records; sites are relative to the module ``path``."""
        self.records, self._path, self._record = records, path, None
        self._widths = _widths(records)
        self.set_num_rows(len(records), cursor)

    def columns(self, width: int) -> list[str]:
        """Return the names of the columns that fit into ``width`` cells next to the site."""
        return list(self.fitting(self._widths, width - 2 - MIN_SITE, _DROPPED_FIRST)) if self._widths else []

    def usual(self) -> Sequence[str]:
        """Return the default columns."""
        return _USUAL

    def choose(self, columns: Sequence[str] | None) -> None:
        """Show the given columns."""
        super().choose(columns)
        self._draw_heading()

    def set_heading(self, title: str, subtitle: str) -> None:
        """Set the upper and lower border titles; the names of hidden columns are appended."""
        self._heading = (title, subtitle)
        self._draw_heading()

    def on_resize(self, event: events.Resize) -> None:
        """Redraw for the new size; other columns may fit."""
        super().on_resize(event)
        self._draw_heading()

    def _draw_heading(self) -> None:
        """Draw the border. Step and rank are not reported as hidden, because the title contains them."""
        title, subtitle = self._heading
        shown = [*self.columns(self.room - 2), "step", "rank"]
        hidden = ", ".join(name for name in (self.chosen or _USUAL) if name not in shown and self._widths)
        self.set_title(title, f"{subtitle} · hides {hidden}" if hidden and subtitle else subtitle)

    def column_at(self, x: int, width: int) -> str:
        """Return the name of the column at cell ``x`` of a line."""
        return column_at(x, width, {name: self._widths[name] for name in self.columns(width)})

    def header(self, width: int) -> Text | None:
        """Return the column names."""
        if not self.records:
            return None
        return self._line("", "site", {name: name for name in self.COLUMNS}, width - 2)

    def format_row(self, row: int, width: int) -> Text:
        """Format a record; numbers are never shortened."""
        record = self.records[row]
        anomaly = anomaly_of(record)
        key, stats = record.key, record.stats
        site = " ".join([relative(self._path, key.site), *firing(key)])
        cells = {
            "step": str(key.step),
            "rank": str(key.rank),
            "shape": _shape(record),
            "dtype": dtypes.short(record.dtype),
            "rms": number(stats.rms if stats else None),
            "|max|": number(stats.absmax if stats else None),
            "nan+inf": count(stats.nonfinite) if stats else "-",
            "mean": number(stats.mean if stats else None),
            "min": number(stats.min if stats else None),
            "max": number(stats.max if stats else None),
            "zeros": count(stats.zeros) if stats else "-",
            "bytes": size(record.nbytes),
        }
        line = self._line(anomaly.glyph if anomaly else "", site, cells, width)
        if anomaly:
            line.stylize("bold")
        return line

    def _line(self, glyph: str, site: str, cells: dict[str, str], width: int) -> Text:
        names = self.columns(width)
        room = max(width - 2 - sum(self._widths[name] + 2 for name in names), 1)
        line = f"{glyph:<1} {shorten(site, room):<{room}}"
        return Text(line + "".join(f"  {cells[name]:>{self._widths[name]}}" for name in names))


def _widths(records: Records) -> dict[str, int]:
    """Compute the width of every column except the site, from distinct contents only."""
    kinds = [records.kinds[code] for code in np.unique(records.kind)]
    steps = [str(step) for step in (records.step.min(), records.step.max())] if records else []
    contents = {
        "step": steps,
        "rank": [str(kind.rank) for kind in kinds],
        "shape": [_shape(kind) for kind in kinds],
        "dtype": [dtypes.short(kind.dtype) for kind in kinds],
        "rms": ["0" * _NUMBER_WIDTH],
        "|max|": ["0" * _NUMBER_WIDTH],
        "nan+inf": [count(int(records.nonfinite.max(initial=0)))],
        **{name: ["0" * _NUMBER_WIDTH] for name in ("mean", "min", "max")},
        "zeros": [count(int(records.nbytes.max(initial=0)))],
        "bytes": ["000 MB"],
    }
    return {
        name: max(len(name), *map(len, cells), 5 if name in ("shape", "dtype") else 0)
        for name, cells in contents.items()
    }


def _shape(record: Record | Kind) -> str:
    return "value" if record.dtype is None else shape(record.shape)
