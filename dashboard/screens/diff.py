"""Screen that compares two runs: the actions of its keys."""

from dataclasses import replace
from pathlib import Path

from rich.text import Text
from textual import on

from tapscope.comparator import Finding
from tapscope.comparator.report.answer import LABEL
from tapscope.core.errors import ConfigError
from tapscope.core.site import compact_ranges
from tapscope.dashboard.compare_settings import parse_tolerance
from tapscope.dashboard.diff_source import SORT_OF_COLUMN, SORTS, DiffQuery, DiffSource
from tapscope.dashboard.keymap import DIFF_KEYS, DIFF_PANES, FINDINGS, LAYERS, bindings
from tapscope.dashboard.model.finding_filter import matching_findings
from tapscope.dashboard.model.grid import group_of
from tapscope.dashboard.module_tree import contains
from tapscope.dashboard.screens.diff_base import DiffBaseScreen
from tapscope.dashboard.screens.help import DIFF_WORDS, HelpScreen, TextScreen
from tapscope.dashboard.widgets.finding_pane import FindingPane
from tapscope.dashboard.widgets.finding_table import FindingTable
from tapscope.dashboard.widgets.layer_grid import LayerGrid
from tapscope.dashboard.widgets.literal_text import literal
from tapscope.dashboard.widgets.row_list import RowList


class DiffScreen(DiffBaseScreen):
    """Comparison of two runs. An action without an effect shows the reason."""

    SPECS = DIFF_KEYS
    BINDINGS = bindings(SPECS)
    PANES = DIFF_PANES
    LIST = FINDINGS

    @property
    def active(self) -> LayerGrid | FindingTable | FindingPane:
        """The focused pane."""
        if self.pane == LAYERS:
            return self.strip
        return self.table if self.pane == FINDINGS else self.pair

    @property
    def search_text(self) -> str:
        """Text of the active search; empty if there is none."""
        return self.query_now.find

    def _compared(self) -> DiffSource | None:
        """Return the comparison; None while it is in progress, with a message to the user."""
        if self.source is None:
            self.say("Still comparing the runs.")
        return self.source

    def search(self, text: str) -> None:
        """Show the findings that match a filter; an invalid filter shows an error and changes nothing."""
        try:
            matching_findings((), text)
        except ConfigError as error:
            self.say(str(error))
            return
        self.ask(replace(self.query_now, find=text))

    # --- choosing ---------------------------------------------------------------------------------

    def action_culprit(self) -> None:
        """Go to the first site where the runs diverge."""
        if (source := self._compared()) is None:
            return
        culprit = source.culprit
        if culprit is None:
            self.say("The runs agree: there is no culprit.")
            return
        self.strip.reveal(None)
        self.ask(replace(self.query_now, group=None, path="", step=None, rank=None, find=""), target=culprit)

    def action_bad(self, direction: int) -> None:
        """Go to the next bad finding in execution order, in any layer."""
        if (source := self._compared()) is None:
            return
        finding = self.table.finding
        next_finding = source.next_bad(finding.order if finding else -1, direction)
        if next_finding is None:
            self.say("No finding differs.")
            return
        query = self.query_now
        self._go_to(next_finding, replace(query, fold=query.fold and next_finding.role != "downstream"))

    def _go_to(self, finding: Finding, query: DiffQuery) -> None:
        name = group_of(finding.site)[0]
        if query.group is not None and (query.group != name or not contains(query.path, finding.site)):
            self.strip.reveal(name)
            query = replace(query, group=name, path="")
        self.ask(replace(query, rank=None, find=""), target=finding)

    def action_cause(self, direction: int) -> None:
        """Go to the next independent cause."""
        if (source := self._compared()) is None:
            return
        finding = self.table.finding
        cause = source.next_cause(finding.order if finding else -1, direction)
        if cause is None:
            self.say("The runs agree: there is no cause." if not source.report.num_bad else "No cause was located.")
            return
        if len(source.report.divergences) == 1 and cause is finding:
            self._sentence = "There is one cause only."
        self._go_to(cause, self.query_now)

    def action_downstream(self) -> None:
        """Fold or unfold downstream findings."""
        if not self.query_now.only_bad:
            self.say("Downstream findings are folded where only differences are shown; press d.")
            return
        self.ask(replace(self.query_now, fold=not self.query_now.fold))

    def action_unfold(self, unfolded: bool) -> None:
        """Show or hide the children of the layer or module under the cursor."""
        if problem := self.strip.unfold(unfolded):
            self.say(problem)

    def action_only_bad(self) -> None:
        """Toggle between findings that differ and all findings."""
        self.ask(replace(self.query_now, only_bad=not self.query_now.only_bad))

    def action_step(self, direction: int) -> None:
        """Show the next or previous target step; before the first step, all steps."""
        steps = [None, *(self.source.steps if self.source else ())]
        now = self.query_now.step
        at = (steps.index(now) if now in steps else 0) + direction
        if not 0 <= at < len(steps):
            self.say("All steps are shown already." if at < 0 else f"Step {now} is the last.")
            return
        self._show_step(steps[at])

    def action_go(self) -> None:
        """Prompt for a step."""
        if (source := self._compared()) is not None:
            self.open_line(f"a step of {compact_ranges(source.steps)}; nothing: all steps", "", self._go)

    def _go(self, text: str) -> str:
        steps = self.source.steps if self.source else ()
        if text and (not text.isdecimal() or int(text) not in steps):
            return f"Step {text!r} was not compared; compared steps: {compact_ranges(steps)}."
        self._show_step(int(text) if text else None)
        return ""

    def _show_step(self, step: int | None) -> None:
        self.ask(replace(self.query_now, step=step))

    def action_rank(self, direction: int) -> None:
        """Show the largest errors on the next or previous target rank; before the first rank, all ranks."""
        ranks = [None, *(self.source.ranks if self.source else ())]
        now = self.query_now.rank
        at = (ranks.index(now) if now in ranks else 0) + direction
        if 0 <= at < len(ranks):
            self.ask(replace(self.query_now, rank=ranks[at]))
        elif len(ranks) < 2:
            self.say("No difference is limited to one rank.")
        else:
            self.say("All ranks are shown already." if at < 0 else f"Rank {now} is the last rank with a difference.")

    def action_zoom_columns(self, direction: int) -> None:
        """Show fewer or more columns of the heat map."""
        if not self.strip.zoom_columns(direction):
            self.say(f"The heat map shows {'one' if direction > 0 else 'every'} {self.strip.axis} already.")

    def action_axis(self) -> None:
        """Cycle the heat map through step, rank and token; the first call reads the values."""
        if (source := self._compared()) is not None:
            self.track(self.load_places(source))

    @on(RowList.HeaderClicked, "#findings")
    def _sort_by_column(self, message: RowList.HeaderClicked) -> None:
        """Sort by the clicked column; clicking it again reverses the order."""
        sort, query = SORT_OF_COLUMN.get(message.column), self.query_now
        if self.source is None:
            return
        if sort is None:
            self.say(f"Not sorted by {message.column}: click {', '.join(SORT_OF_COLUMN)}.")
            return
        self.ask(replace(query, sort=sort, reverse=sort == query.sort and not query.reverse))

    def action_sort(self) -> None:
        """Select the next sort order."""
        self.ask(
            replace(self.query_now, sort=SORTS[(SORTS.index(self.query_now.sort) + 1) % len(SORTS)], reverse=False)
        )

    def action_columns(self) -> None:
        """Open the column chooser."""
        self.open_columns(self.table)

    def action_measure(self) -> None:
        """Show another measure in the list, unless the user chose columns."""
        if self.table.chosen is not None:
            key = next(spec.shown for spec in self.specs if spec.id == "columns")
            self.say(f"The columns were chosen; press {key} to change them.")
            return
        self.say(f"The list shows {self.table.next_measure()} and {self.table.measures[1]}.")

    # --- looking ----------------------------------------------------------------------------------

    def action_view(self) -> None:
        """Show the next view of the pair: measures, tokens, values, details, series."""
        self.pair.next_view()
        self.show_detail()

    def action_modules(self) -> None:
        """Open the module tree with errors."""
        if (source := self._compared()) is not None:
            self.track(self.load_modules(source))

    def action_cells(self) -> None:
        """Show all values of both sides with a cursor."""
        finding = self.table.finding
        if (source := self._compared()) is None or finding is None:
            return
        self.track(self.load_table(source, finding, step=self.query_now.step))

    def action_swap(self) -> None:
        """Swap baseline and target, and compare again."""
        self.way = replace(self.way, swapped=not self.way.swapped)
        self.compare()

    def action_tolerance(self) -> None:
        """Prompt for a tolerance."""
        tolerance = self.source.report.options.tolerance if self.source else None
        value = f"{tolerance[1]:g} {tolerance[0]:g}" if tolerance else ""
        self.open_line("rtol, or rtol and atol; nothing: the floor", value, self._judge_by)

    def _judge_by(self, text: str) -> str:
        try:
            self.way = replace(self.way, tolerance=parse_tolerance(text))
        except ConfigError as error:
            return str(error)
        self.compare()
        return ""

    def action_reload(self) -> None:
        """Read both runs again and compare them."""
        self.compare(afresh=True)

    def action_copy(self) -> None:
        """Copy the equivalent command line to the clipboard."""
        if (source := self._compared()) is not None:
            command = source.command(self.table.finding)
            self.app.copy_to_clipboard(command)
            self.say(f"copied: {command}")

    def action_export(self) -> None:
        """Export the report as JSON lines."""
        if (source := self._compared()) is None:
            return
        try:
            self.say(f"wrote {source.export(Path.cwd())}")
        except OSError as error:
            self.say(f"the report cannot be written here: {error}")

    def action_account(self) -> None:
        """Show the report without its findings."""
        if (source := self._compared()) is not None:
            self.app.push_screen(TextScreen("report", Text("\n").join(map(literal, source.account())), indent=LABEL))

    def action_help(self) -> None:
        """Show the keys, with those of the focused pane first."""
        self.app.push_screen(HelpScreen(self.specs, self.pane, DIFF_WORDS))
