"""Heat map of one run, layers × steps; layers unfold into modules and sites."""

from rich.style import Style

from tapscope.comparator import Verdict
from tapscope.dashboard.model.grid import GridColumn, layer_grid
from tapscope.dashboard.model.magnitudes import MagnitudeCell, MagnitudeGrid
from tapscope.dashboard.widgets.layer_grid import LayerGrid


class MagnitudeMap(LayerGrid):
    """A :class:`LayerGrid` of magnitudes; ``%`` marks rows with non-finite values."""

    def __init__(self) -> None:
        super().__init__()
        self.sites: MagnitudeGrid | None = None
        """Sites × steps, as shown."""
        self._note = ""

    def set_magnitudes(self, sites: MagnitudeGrid) -> None:
        """Show another heat map; cursor and unfolded lines are kept if the sites are the same."""
        is_same = self.sites is not None and self.sites.rows == sites.rows
        unfolded, cursor, span = set(self._unfolded), self.cursor, self._span
        self.sites = sites
        self.set_grids(layer_grid(sites), sites, None)
        if is_same:
            self._unfolded |= unfolded
            self._span = span
            self._arrange(cursor)

    def set_note(self, note: str) -> None:
        """Set the note in the lower border."""
        self._note = note
        self._draw_title()

    @property
    def site_numbers(self) -> tuple[int, ...]:
        """Rows of :attr:`sites` that belong to the line under the cursor."""
        if self.sites is None or self.layer_rows is None:
            return ()
        line = self._line
        return line.row.orders if line is not None else tuple(range(len(self.sites.rows)))

    def cell_under(self, step: int | None) -> tuple[str, GridColumn, MagnitudeCell] | None:
        """Return (site, column, cell) of the largest measure on the cursor's line, within ``step`` if given.

        Non-finite values rank first. None if there are no statistics.
        """
        sites, rows = self.sites, self.site_numbers
        column = None if sites is None or step is None else sites.column_of(step)
        at = None if sites is None else sites.largest(rows, column)
        if sites is None or at is None:
            return None
        return sites.rows[at[0]].name, sites.columns[at[1]], sites.cell(*at)

    def title(self) -> str:
        """Return the title of the pane."""
        measure = f" · {self.sites.measure}" if self.sites is not None else ""
        return f"{super().title()}{measure}"

    def subtitle(self) -> str:
        """Return the note, and the numbers of steps and of columns if steps are binned."""
        return " · ".join(filter(None, (self._note, super().subtitle())))

    def mark(self, verdict: Verdict) -> str:
        """Return the character before a row's name."""
        return "%" if verdict.is_bad else " "

    def _style(self, verdict: Verdict | None) -> Style:
        return self.bad_style if verdict is not None and verdict.is_bad else Style()
