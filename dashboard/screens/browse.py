"""BrowseScreen: what each key does to the panes."""

from dataclasses import replace

from textual import events, on
from textual.widgets import Input

from tapscope.dashboard.keys import KEYS, PANES, RECORDS, SITES, bindings
from tapscope.dashboard.screens.help import HelpScreen
from tapscope.dashboard.screens.panes import PanesScreen
from tapscope.dashboard.sources import BIG_TENSOR_BYTES, SORTS
from tapscope.dashboard.tree import contains
from tapscope.dashboard.widgets.record_table import RecordTable
from tapscope.dashboard.widgets.site_tree import SiteTree
from tapscope.dashboard.widgets.tensor_pane import TensorPane


class BrowseScreen(PanesScreen):
    """Browse one run. An action that can do nothing says why."""

    BINDINGS = bindings(KEYS)

    @property
    def active(self) -> "SiteTree | RecordTable | TensorPane":
        """The pane that has the keys."""
        if self.pane == SITES:
            return self.sites
        return self.table if self.pane == RECORDS else self.tensor

    # --- moving -----------------------------------------------------------------------------------

    def action_move(self, delta: int) -> None:
        """Lines up or down."""
        self.active.move(delta)

    def action_page(self, direction: int) -> None:
        """A page up or down."""
        self.active.page(direction)

    def action_ends(self, direction: int) -> None:
        """First or last line."""
        self.active.ends(direction)

    def action_fold(self) -> None:
        """Fold a module."""
        if self.pane == SITES:
            self.sites.fold()

    def action_unfold(self) -> None:
        """Unfold a module."""
        if self.pane == SITES:
            self.sites.unfold()

    def action_pane(self, direction: int) -> None:
        """Give the keys to another pane."""
        self._activate(PANES[(PANES.index(self.pane) + direction) % len(PANES)])
        self.active.focus()

    def on_click(self, event: events.Click) -> None:
        """A click gives the keys to a pane, too."""
        clicked = event.widget.ancestors_with_self if event.widget is not None else ()
        pane = next((node.id for node in clicked if node.id in PANES), None)
        if pane is not None:
            self._activate(pane)
            self.active.focus()

    def _activate(self, pane: str) -> None:
        self.remove_class(f"-at-{self.pane}")
        self.add_class(f"-at-{pane}")
        self.pane = pane
        self.draw_keys()

    # --- choosing ---------------------------------------------------------------------------------

    def action_step(self, direction: int) -> None:
        """Another step, the same site."""
        self._turn("step", direction)

    def action_rank(self, direction: int) -> None:
        """Another rank, the same site."""
        self._turn("rank", direction)

    def _turn(self, what: str, direction: int) -> None:
        source, query = self.source, self.query_now
        if source is None or query is None:
            return
        numbers = source.steps if what == "step" else source.ranks
        now = query.step if what == "step" else query.rank
        at = numbers.index(now) + direction if now in numbers else 0
        if 0 <= at < len(numbers):
            turned = replace(query, step=numbers[at]) if what == "step" else replace(query, rank=numbers[at])
            self.ask(turned)
        elif len(numbers) < 2:
            self.say(f"There is only one {what}.")
        else:
            self.say(f"{what} {now} is the {'first' if direction < 0 else 'last'}.")

    def action_odd(self, direction: int) -> None:
        """The next record that looks wrong, anywhere in the run."""
        source, query, record = self.source, self.query_now, self.table.record
        if source is None or query is None:
            return
        found = source.next_odd(query.step, query.rank, record.seq if record else -1, direction)
        if found is None:
            self.say("No record of this run holds nan, inf or only zeros.")
            return
        key, path = found.key, query.path
        if query.find or not contains(path, key.site):
            path = key.site.rpartition(":")[0].rpartition(".")[0]
            self.sites.reveal(path)
        if found is record:
            self.say_next("This is the only record that looks wrong.")
        elif ((key.step, key.rank, found.seq) > (query.step, query.rank, record.seq if record else -1)) != (
            direction > 0
        ):
            self.say_next(f"Around the end of the run: this is the {'first' if direction > 0 else 'last'} odd record.")
        self.ask(replace(query, step=key.step, rank=key.rank, path=path, find=""), target=key)

    def action_sort(self) -> None:
        """In order, by |max|, by size."""
        if self.query_now is not None:
            self.ask(replace(self.query_now, sort=SORTS[(SORTS.index(self.query_now.sort) + 1) % len(SORTS)]))

    def action_find(self) -> None:
        """Open the search line."""
        line = self.query_one("#find", Input)
        line.value = ""
        line.add_class("-open")
        line.focus()

    @on(Input.Changed, "#find")
    def _find_changed(self, event: Input.Changed) -> None:
        if self.query_now is not None and self.query_one("#find").has_class("-open"):
            self.ask(replace(self.query_now, find=event.value.strip()))

    @on(Input.Submitted, "#find")
    def _find_submitted(self) -> None:
        self._close_find()

    def _close_find(self) -> None:
        self.query_one("#find").remove_class("-open")
        self._activate(RECORDS)
        self.table.focus()

    def action_back(self) -> None:
        """End the search first, then the zoom."""
        is_open = self.query_one("#find").has_class("-open")
        if is_open:
            self._close_find()
        if self.query_now is not None and self.query_now.find:
            self.ask(replace(self.query_now, find=""))
        elif not is_open:
            self.remove_class("-zoomed")
            self.draw_keys()

    # --- looking ----------------------------------------------------------------------------------

    def action_view(self) -> None:
        """Statistics, histogram, values."""
        self.tensor.next_view()

    def action_zoom(self) -> None:
        """One pane on the whole screen."""
        self.toggle_class("-zoomed")
        self.draw_keys()

    def action_load(self) -> None:
        """Read a big tensor after all."""
        record = self.table.record
        if record is None or record.nbytes <= BIG_TENSOR_BYTES:
            self.say("There is no tensor of more than 256 MB here to read.")
            return
        self.show_record(allow_big=True)

    def action_copy(self) -> None:
        """The same on the command line, to the clipboard."""
        if self.source is not None and self.query_now is not None:
            command = self.source.command(self.table.record, self.query_now)
            self.app.copy_to_clipboard(command)
            self.say(f"copied: {command}")

    def action_reload(self) -> None:
        """Read the run again."""
        self.settled = False
        self.load_source(self._open)

    def action_help(self) -> None:
        """Keys, those of this pane first."""
        self.app.push_screen(HelpScreen(self._specs, self.pane))

    async def action_quit(self) -> None:
        """Leave."""
        self.app.exit()
