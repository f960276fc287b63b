"""RecordTable: the records of the chosen module, step and rank."""

from collections.abc import Sequence

from rich.text import Text
from textual import events

from tapscope.core import dtypes
from tapscope.core.formatting import count, number, shape
from tapscope.core.formatting import site as shorten
from tapscope.dashboard.keymap import RECORDS
from tapscope.dashboard.module_tree import relative
from tapscope.dashboard.widgets.row_list import RowList
from tapscope.render.anomalies import anomaly_of
from tapscope.render.record_notes import firing
from tapscope.run_format.record import Record

MIN_SITE = 28
"""Cells a site needs; columns are left out before it gets less."""

_DROPPED_FIRST = ("rank", "step", "dtype", "rms", "shape", "nan+inf")
_NUMBER_WIDTH = 8


class RecordTable(RowList):
    """Right upper pane of the browse screen."""

    def __init__(self) -> None:
        super().__init__(RECORDS)
        self.records: Sequence[Record] = ()
        self._path = ""
        self._heading = ("", "")
        self._widths: dict[str, int] = {}

    @property
    def record(self) -> Record | None:
        """The record under the cursor."""
        return self.records[self.cursor] if self.records else None

    def set_records(self, records: Sequence[Record], path: str, cursor: int) -> None:
        """Show these records, their sites relative to the module ``path``."""
        self.records, self._path = records, path
        self._widths = _widths(records)
        self.set_num_rows(len(records), cursor)

    def columns(self, width: int) -> list[str]:
        """Names of the columns that fit into ``width`` cells next to the site."""
        names = list(self._widths)
        for dropped in _DROPPED_FIRST:
            if width - 2 - sum(self._widths[name] + 2 for name in names) >= MIN_SITE:
                break
            names = [name for name in names if name != dropped]
        return names

    def set_heading(self, title: str, subtitle: str) -> None:
        """Text in the border; the columns that do not fit are added to it."""
        self._heading = (title, subtitle)
        self._draw_heading()

    def on_resize(self, event: events.Resize) -> None:
        """Other columns may fit."""
        super().on_resize(event)
        self._draw_heading()

    def _draw_heading(self) -> None:
        """Step and rank are in the title anyway: their columns may go without a word."""
        title, subtitle = self._heading
        shown = [*self.columns(self.room - 2), "step", "rank"]
        hidden = ", ".join(name for name in self._widths if name not in shown)
        self.set_title(title, f"{subtitle} · hides {hidden}" if hidden and subtitle else subtitle)

    def header(self, width: int) -> Text | None:
        """Names of the columns."""
        if not self.records:
            return None
        return self._line("", "site", {name: name for name in self._widths}, width - 2)

    def format_row(self, row: int, width: int) -> Text:
        """One record; numbers are never shortened."""
        record = self.records[row]
        odd = anomaly_of(record)
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
        }
        line = self._line(odd.glyph if odd else "", site, cells, width)
        if odd:
            line.stylize("bold")
        return line

    def _line(self, glyph: str, site: str, cells: dict[str, str], width: int) -> Text:
        names = self.columns(width)
        room = max(width - 2 - sum(self._widths[name] + 2 for name in names), 1)
        line = f"{glyph:<1} {shorten(site, room):<{room}}"
        return Text(line + "".join(f"  {cells[name]:>{self._widths[name]}}" for name in names))


def _widths(records: Sequence[Record]) -> dict[str, int]:
    """Width of every column but the site, over distinct contents only."""
    keys = {"step": {r.key.step for r in records}, "rank": {r.key.rank for r in records}}
    widths = {name: max([len(name), *(len(str(n)) for n in found)]) for name, found in keys.items()}
    shapes = {(r.dtype is None, r.shape): _shape(r) for r in records}
    widths["shape"] = max([5, *map(len, shapes.values())])
    widths["dtype"] = max([5, *(len(dtypes.short(name)) for name in {r.dtype for r in records})])
    worst = max((r.stats.nonfinite for r in records if r.stats), default=0)
    return widths | {"rms": _NUMBER_WIDTH, "|max|": _NUMBER_WIDTH, "nan+inf": max(7, len(count(worst)))}


def _shape(record: Record) -> str:
    return "value" if record.dtype is None else shape(record.shape)
