"""Screen with the heat map of one run, layers × steps, by |max|, rms, non-finite values, or zeros."""

from collections.abc import Sequence
from dataclasses import dataclass

from textual import on, work
from textual.app import ComposeResult

from tapscope.core.formatting import site as shorten
from tapscope.core.site import compact_ranges
from tapscope.dashboard.bookmarks import path_text
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.keymap import LAYERS, MAP_KEYS, bindings
from tapscope.dashboard.messages import Answer
from tapscope.dashboard.model.filter import site_test
from tapscope.dashboard.model.magnitudes import MEASURES, MagnitudeGrid, magnitudes_of
from tapscope.dashboard.model.permalink import Permalink
from tapscope.dashboard.model.run import cell_records
from tapscope.dashboard.screens.detail_screen import DetailScreen
from tapscope.dashboard.widgets.line_input import LineInput
from tapscope.dashboard.widgets.magnitude_map import MagnitudeMap
from tapscope.dashboard.widgets.row_list import RowList
from tapscope.dashboard.widgets.status_bar import KeyBar, StatusBar

MAX_CELLS = 4_000_000
MAP_WORDS = """
1 to 9: from the smallest to the largest of the run, on a log scale. ∅: only zeros. %: values that are not finite.
· no statistics were recorded. A layer, and steps that share a column, show the largest of what they hold."""


@dataclass
class MagnitudesReady(Answer):
    """The heat map of all sites, on one rank or over all ranks."""

    grid: MagnitudeGrid


class RunMapScreen(DetailScreen):
    """Heat map of one run. Closes with the permalink of the record with the largest measure on the cursor's line."""

    SPECS = MAP_KEYS
    BINDINGS = bindings(SPECS)
    WORDS = MAP_WORDS
    PANES = (LAYERS,)
    LIST = LAYERS
    AUTO_FOCUS = f"#{LAYERS}"

    def __init__(self, source: RunSource) -> None:
        """``source`` is the open run."""
        super().__init__()
        self._source = source
        self.pane = LAYERS
        self.measure = MEASURES[0]
        self.step: int | None = None
        """The chosen step; None for all steps."""
        self.rank: int | None = None
        """The chosen rank; None for all ranks."""
        self._find = ""
        self._grid: MagnitudeGrid | None = None

    def compose(self) -> ComposeResult:
        """Yield header, heat map, input lines, and key bar."""
        yield StatusBar()
        yield MagnitudeMap()
        yield LineInput(placeholder="mlp *proj:out", id="find")
        yield LineInput(id="line")
        yield KeyBar()

    def on_mount(self) -> None:
        """Start reading the statistics."""
        self.query_one(StatusBar).set_header(self._source.header)
        self.active.empty_text = "Reading statistics ..."
        self.draw_keys()
        self._read()

    @property
    def active(self) -> MagnitudeMap:
        """The only pane."""
        return self.query_one(MagnitudeMap)

    @property
    def search_text(self) -> str:
        """Text of the active search; empty if there is none."""
        return self._find

    def search(self, text: str) -> None:
        """Show only the sites that match."""
        self._find = text
        self._show()

    # --- reading ----------------------------------------------------------------------------------

    def _read(self) -> None:
        self.track(self._load(self._source, self.rank, self.measure))

    @work(thread=True, exclusive=True, group="magnitudes")
    def _load(self, source: RunSource, rank: int | None, measure: str) -> None:
        num_columns = max(MAX_CELLS // max(source.num_sites, 1), 1)
        self.post_message(MagnitudesReady(magnitudes_of(source, rank, num_columns, measure)))

    @on(MagnitudesReady)
    def _take_magnitudes(self, message: MagnitudesReady) -> None:
        if self.accept(message):
            self._grid = message.grid
            self._show()

    def _show(self) -> None:
        grid, shown = self._grid, self.active
        if grid is None:
            return
        if self._find:
            matches = site_test(self._find)
            grid = grid.selected([i for i, row in enumerate(grid.rows) if matches(row.name)])
        shown.empty_text = f'No site matches "{self._find}". Press esc to end the search.' if self._find else ""
        shown.set_magnitudes(grid)
        shown.set_chosen(self.step)
        self._describe()

    @on(RowList.Moved, f"#{LAYERS}")
    def _describe(self) -> None:
        """Show the largest measure of the row under the cursor in the lower border."""
        at = self.active.cell_under(self.step)
        rank = "" if self.rank is None else f" on rank {self.rank}"
        if at is None:
            self.active.set_note(f"no statistics in {'any step' if self.step is None else f'step {self.step}'}{rank}")
            return
        site, column, cell = at
        bad = " and NaN or infinity" if cell.glyph == "%" else ""
        self.active.set_note(f"{shorten(site, 40)} step {column.label}{rank}: {self.measure} {cell.text}{bad}")

    def draw_keys(self) -> None:
        """Show the keys that currently have an effect."""
        many = len(self._source.steps) > 1, len(self._source.ranks) > 1
        works = dict.fromkeys(("previous_step", "next_step", "go"), many[0])
        works |= dict.fromkeys(("previous_rank", "next_rank"), many[1])
        self.query_one(KeyBar).set_keys([spec for spec in self.specs if spec.label and works.get(spec.id, True)])

    # --- keys -------------------------------------------------------------------------------------

    def action_unfold(self, unfolded: bool) -> None:
        """Show or hide the children of the layer or module under the cursor."""
        if problem := self.active.unfold(unfolded):
            self.say(problem)
        self._describe()

    def action_zoom_columns(self, direction: int) -> None:
        """Show fewer or more columns of the heat map."""
        if not self.active.zoom_columns(direction):
            self.say(f"The heat map shows {'one column' if direction > 0 else 'every step'} already.")

    def action_measure(self) -> None:
        """Show the next measure."""
        self.measure = MEASURES[(MEASURES.index(self.measure) + 1) % len(MEASURES)]
        self._read()

    def action_step(self, direction: int) -> None:
        """Show the next or previous step, or all steps."""
        self.step = _next_or_all(self._source.steps, self.step, direction)
        self._show_step()

    def action_rank(self, direction: int) -> None:
        """Show the next or previous rank, or all ranks."""
        if len(self._source.ranks) < 2:
            self.say("There is only one rank.")
            return
        self.rank = _next_or_all(self._source.ranks, self.rank, direction)
        self._read()

    def action_go(self) -> None:
        """Prompt for a step."""
        self.open_line(f"a step of {compact_ranges(self._source.steps)}; nothing for all", "", self._go)

    def _go(self, text: str) -> str:
        if text and (not text.isdecimal() or int(text) not in self._source.steps):
            return f"Unknown step {text!r}; this run has {compact_ranges(self._source.steps)}."
        self.step = int(text) if text else None
        self._show_step()
        return ""

    def _show_step(self) -> None:
        self.active.set_chosen(self.step)
        self._describe()

    def _permalink(self) -> Permalink | None:
        at = self.active.cell_under(self.step)
        if at is None:
            return None
        site, column, _ = at
        first, last = (column.first, column.last) if self.step is None else (self.step, self.step)
        cell = cell_records(self._source, site, first, last, self.rank)
        return Permalink(self._source.run.name, site, cell.step, cell.records[0].rank) if cell.records else None

    def action_zoom(self) -> None:
        """Close the screen and open the record under the cursor on the screen below."""
        link = self._permalink()
        if link is None:
            self.say("No record with statistics here.")
        else:
            self.dismiss(link)

    def action_copy(self) -> None:
        """Copy the permalink of the record under the cursor."""
        if not self.link:
            self.say("No record with statistics here.")
            return
        self.app.copy_to_clipboard(self.link)
        self.say(f"copied: {self.link}")

    @property
    def runs(self) -> dict[str, str]:
        """Path -> name of the run on the screen."""
        return {path_text(self._source.run.path): self._source.run.name}

    @property
    def link(self) -> str:
        """Permalink of the record that :meth:`action_zoom` opens."""
        return str(self._permalink() or "")


def _next_or_all(numbers: Sequence[int], now: int | None, direction: int) -> int | None:
    """Return the next of ``numbers``, cyclically; None, which stands for all, follows the last one."""
    every = (None, *numbers)
    return every[((every.index(now) if now in every else 0) + direction) % len(every)]
