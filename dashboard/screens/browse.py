"""Screen that browses one run: the actions of its keys."""

from dataclasses import replace

from textual import on

from tapscope.core.errors import ConfigError
from tapscope.core.site import compact_ranges, module_of
from tapscope.dashboard import messages
from tapscope.dashboard.browse_source import ACCOUNT_INDENT, BIG_TENSOR_BYTES, SORT_OF_COLUMN, SORTS
from tapscope.dashboard.capture_control import COMMANDS
from tapscope.dashboard.keymap import KEYS, PANES, RECORDS, SITES, bindings
from tapscope.dashboard.model.record_filter import matching_records
from tapscope.dashboard.module_tree import contains
from tapscope.dashboard.screens.browse_base import BrowseBaseScreen
from tapscope.dashboard.screens.help import HelpScreen, TextScreen
from tapscope.dashboard.widgets.record_table import RecordTable
from tapscope.dashboard.widgets.row_list import RowList
from tapscope.dashboard.widgets.site_tree import SiteTree
from tapscope.dashboard.widgets.tensor_pane import TensorPane
from tapscope.run_format.records import Records


class BrowseScreen(BrowseBaseScreen):
    """Browser of one run. An action without an effect shows the reason."""

    SPECS = KEYS
    BINDINGS = bindings(SPECS)
    PANES = PANES
    LIST = RECORDS

    @property
    def active(self) -> "SiteTree | RecordTable | TensorPane":
        """The focused pane."""
        if self.pane == SITES:
            return self.sites
        return self.table if self.pane == RECORDS else self.tensor

    @property
    def search_text(self) -> str:
        """Text of the active search; empty if there is none."""
        return self.query_now.find if self.query_now else ""

    def search(self, text: str) -> None:
        """Show the records that match a filter; an invalid filter shows an error and changes nothing."""
        if self.query_now is not None:
            try:
                matching_records(Records(), text)
            except ConfigError as error:
                self.say(str(error))
                return
            self.ask(replace(self.query_now, find=text))

    def action_fold(self) -> None:
        """Fold the module under the cursor."""
        if self.pane == SITES:
            self.sites.fold()

    def action_unfold(self) -> None:
        """Unfold the module under the cursor."""
        if self.pane == SITES:
            self.sites.unfold()

    # --- choosing ---------------------------------------------------------------------------------

    def action_step(self, direction: int) -> None:
        """Show another step with the cursor on the same site."""
        self._change("step", direction)

    def action_rank(self, direction: int) -> None:
        """Show another rank with the cursor on the same site."""
        self._change("rank", direction)

    def _change(self, what: str, direction: int) -> None:
        source, query = self.source, self.query_now
        if source is None or query is None:
            return
        numbers = source.steps if what == "step" else source.ranks
        now = query.step if what == "step" else query.rank
        at = numbers.index(now) + direction if now in numbers else 0
        self.stay()
        if 0 <= at < len(numbers):
            turned = replace(query, step=numbers[at]) if what == "step" else replace(query, rank=numbers[at])
            self.ask(turned)
        elif len(numbers) < 2:
            self.say(f"There is only one {what}.")
        else:
            self.say(f"{what} {now} is the {'first' if direction < 0 else 'last'}.")

    def action_go(self) -> None:
        """Prompt for a step."""
        if self.source is not None:
            self.open_line(f"a step of {compact_ranges(self.source.steps)}", "", self._go)

    def _go(self, text: str) -> str:
        source, query = self.source, self.query_now
        if source is None or query is None:
            return "The run is still being read."
        if not text.isdecimal() or int(text) not in source.steps:
            return f"Unknown step {text!r}; this run has {compact_ranges(source.steps)}."
        self.stay()
        self.ask(replace(query, step=int(text)))
        return ""

    def action_live(self) -> None:
        """Open the live screen of the run."""
        if self.source is None:
            self.say("The run is still being read.")
        else:
            self.show_live(self.source.run.path, self.source.run.name)

    def action_run_map(self) -> None:
        """Open the heat map of the run; a record chosen there is shown on this screen."""
        if self.source is None or self.query_now is None or not self.source.run.records:
            self.say("The run has no records yet.")
            return
        from tapscope.dashboard.screens.run_map import RunMapScreen  # the comparator is slow to import

        self.push(RunMapScreen(self.source))

    def action_capture(self) -> None:
        """Prompt for a command that switches capture of the live job."""
        if self.control is None:
            self.say("No live job to control: start tapscope view with --control [HOST:]PORT or --control RUN.")
        else:
            self.open_line(COMMANDS, "", self._capture)

    def _capture(self, text: str) -> str:
        if self.control is not None and text:
            self.track(self.switch_capture(self.control, text))
        return ""

    def action_anomaly(self, direction: int) -> None:
        """Go to the next or previous record with an anomaly, in any step and rank."""
        source, query, record = self.source, self.query_now, self.table.record
        if source is None or query is None:
            return
        anomaly = source.next_anomaly(query.step, query.rank, record.seq if record else -1, direction)
        if anomaly is None:
            self.say("No record of this run holds NaN, infinity or only zeros.")
            return
        self.stay()
        key, path = anomaly.key, query.path
        if query.find or not contains(path, key.site):
            path = module_of(key.site).rpartition(".")[0]
            self.sites.reveal(path)
        if anomaly is record:
            self.say_next("This is the only record with an anomaly.")
        elif ((key.step, key.rank, anomaly.seq) > (query.step, query.rank, record.seq if record else -1)) != (
            direction > 0
        ):
            self.say_next(f"Search wrapped: this is the {'first' if direction > 0 else 'last'} anomaly of the run.")
        self.ask(replace(query, step=key.step, rank=key.rank, path=path, find=""), target=key)

    @on(RowList.HeaderClicked, "#records")
    def _sort_by_column(self, message: RowList.HeaderClicked) -> None:
        """Sort by the clicked column; clicking it again reverses the order."""
        sort, query = SORT_OF_COLUMN.get(message.column), self.query_now
        if query is None:
            return
        if sort is None:
            self.say(f"Not sorted by {message.column}: click {', '.join(SORT_OF_COLUMN)}.")
            return
        self.ask(replace(query, sort=sort, reverse=sort == query.sort and not query.reverse))

    def action_columns(self) -> None:
        """Open the column chooser."""
        self.open_columns(self.table)

    def action_sort(self) -> None:
        """Select the next sort order."""
        if self.query_now is not None:
            self.ask(
                replace(self.query_now, sort=SORTS[(SORTS.index(self.query_now.sort) + 1) % len(SORTS)], reverse=False)
            )

    # --- looking ----------------------------------------------------------------------------------

    def action_view(self) -> None:
        """Show the next view of the tensor: statistics, histogram, values, series."""
        self.tensor.next_view()
        self.show_series()

    def action_modules(self) -> None:
        """Open the module tree of this step and rank."""
        if self.source is None or self.query_now is None:
            self.say("The run is still being read.")
            return
        self.track(self.load_modules(self.source, self.query_now.step, self.query_now.rank))

    def action_cells(self) -> None:
        """Show all values of the record with a cursor."""
        record = self.table.record
        if self.source is None or record is None or record.entry is None:
            self.say("No tensor with recorded values here.")
            return
        self.track(self.load_table(self.source, record))

    def action_load(self) -> None:
        """Read a tensor that exceeds the size limit."""
        record = self.table.record
        if record is None or record.nbytes <= BIG_TENSOR_BYTES:
            self.say("No tensor over 256 MB here.")
            return
        self.show_record(allow_big=True)

    def action_copy(self) -> None:
        """Copy the equivalent command line to the clipboard."""
        if self.source is not None and self.query_now is not None:
            command = self.source.command(self.table.record, self.query_now)
            self.app.copy_to_clipboard(command)
            self.say(f"copied: {command}")

    def action_export(self) -> None:
        """Export the tensor as a file."""
        record = self.table.record
        if self.source is None or record is None or record.entry is None:
            self.say("No tensor with recorded values here.")
            return
        self.track(self.export_record(self.source, record))

    @on(messages.StatusMessage)
    def _take_sentence(self, message: messages.StatusMessage) -> None:
        if self.accept(message):
            self.say(message.sentence)

    def action_account(self) -> None:
        """Show the output of `tapscope info`."""
        if self.source is not None:
            self.track(self.load_account(self.source))

    @on(messages.AccountReady)
    def _take_account(self, message: messages.AccountReady) -> None:
        if self.accept(message):
            self.app.push_screen(TextScreen("info", message.text, indent=ACCOUNT_INDENT))

    def action_help(self) -> None:
        """Show the keys, with those of the focused pane first."""
        self.app.push_screen(HelpScreen(self.specs, self.pane))
