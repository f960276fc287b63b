"""Base of the diff screen: layers, findings and one pair of values, and the handling of worker results."""

from dataclasses import replace
from functools import partial

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from tapscope.comparator import Finding
from tapscope.comparator.report.answer import LABEL
from tapscope.core.formatting import count, plural
from tapscope.dashboard import messages
from tapscope.dashboard.compare_settings import CompareSettings
from tapscope.dashboard.diff_source import DiffQuery, DiffSource
from tapscope.dashboard.keymap import FINDINGS
from tapscope.dashboard.model.grid import Grid, group_of, layer_grid
from tapscope.dashboard.model.permalink import Permalink
from tapscope.dashboard.model.run_data import Header
from tapscope.dashboard.screens.diff_workers import DiffWorkersScreen, Open
from tapscope.dashboard.widgets.answer_bar import AnswerBar
from tapscope.dashboard.widgets.finding_pane import FindingPane
from tapscope.dashboard.widgets.finding_table import FindingTable
from tapscope.dashboard.widgets.layer_grid import LayerGrid
from tapscope.dashboard.widgets.line_input import LineInput
from tapscope.dashboard.widgets.row_list import RowList
from tapscope.dashboard.widgets.status_bar import KeyBar, StatusBar

REST_S = 0.15
"""Delay in seconds after a cursor move until a pair is read."""


class DiffBaseScreen(DiffWorkersScreen):
    """Diff screen without actions, which are in DiffScreen.

    The state is one query and one finding; panes display it and workers compute results.
    """

    AUTO_FOCUS = ""
    VERTICAL_BREAKPOINTS = [(0, "-low"), (20, "-high")]  # noqa: RUF012
    HORIZONTAL_BREAKPOINTS = [(0, "-single"), (60, "-narrow"), (100, "-wide")]  # noqa: RUF012

    def __init__(self, open_source: Open, title: str, at: Permalink | None = None) -> None:
        """``title`` is shown until the comparison is complete; ``at`` is the place to open, by default the culprit."""
        super().__init__(classes="-at-findings")
        self._open, self._title, self._at = open_source, title, at
        self.source: DiffSource | None = None
        """None while the runs are being compared."""
        self._old: DiffSource | None = None
        self.query_now = DiffQuery()
        self.pane = FINDINGS
        self.way = CompareSettings()
        self._last_way = self.way
        self._target: Finding | None = None
        self._sentence = ""
        """Message to show after the next redraw."""

    def compose(self) -> ComposeResult:
        """Yield header, answer, three panes, input lines, and key bar."""
        yield StatusBar()
        yield AnswerBar()
        with Horizontal(id="panes"):
            yield LayerGrid()
            with Vertical(id="right"):
                yield FindingTable()
                yield FindingPane()
        yield LineInput(placeholder="mlp *proj:out is:differs ratio:>10 layer:0..3 -dtype:fp8", id="find")
        yield LineInput(id="line")
        yield KeyBar()

    def on_mount(self) -> None:
        """Start the comparison."""
        self.strip = self.query_one(LayerGrid)
        self.table = self.query_one(FindingTable)
        self.pair = self.query_one(FindingPane)
        self.bar = self.query_one(KeyBar)
        self.show_chosen_columns(self.table)
        self.table.focus()
        self.compare()

    def compare(self, *, afresh: bool = False) -> None:
        """Compare with the current settings; ``afresh`` reads both runs again."""
        self.cancel_workers()
        self._old, self.source = self.source or self._old, None
        self.query_one(StatusBar).set_header(Header(self._title, (), "COMPARING", ()))
        self.table.empty_text = "Comparing the runs ..."
        self.table.set_findings((), -1)
        self.pair.show(None, None, (), "")
        self.track(self.load(self._open, self.way, None if afresh else self._old))

    # --- answers of the workers -------------------------------------------------------------------

    @on(messages.Comparing)
    def _take_progress(self, message: messages.Comparing) -> None:
        if not message.worker.is_cancelled:
            self.table.empty_text = f"Comparing the runs ... {count(message.done)} of {count(message.total)} sites"
            self.table.refresh()

    @on(messages.Compared)
    def _take_source(self, message: messages.Compared) -> None:
        shown = [each for each in (self._old, self.source) if each is not None]
        if not self.accept(message):
            if not any(each.shares_runs(message.source) for each in shown):
                message.source.close()
            return
        for done in shown:
            if not done.shares_runs(message.source):
                done.close()
        self._old, self.source, self._last_way = None, message.source, self.way
        source = message.source
        culprit = source.culprit
        self.query_one(StatusBar).set_header(source.header)
        self.query_one(AnswerBar).set_answer(source.answer)
        self._show_grid(source.sites)
        if self._at is not None:
            at, self._at = self._at, None
            self.open_link(at)
            return
        self.ask(DiffQuery(only_bad=source.report.num_bad > 0), target=culprit)

    def _show_grid(self, sites: Grid) -> None:
        """Show the heat map of the sites and of their layers."""
        source = self.source
        if source is None:
            return
        culprit = source.culprit
        layers = source.layers if sites is source.sites else layer_grid(sites)
        self.strip.set_grids(layers, sites, group_of(culprit.site)[0] if culprit else None)
        self._mark_column()

    def _mark_column(self) -> None:
        """Highlight the chosen step or rank in the heat map."""
        of_axis = {"step": self.query_now.step, "rank": self.query_now.rank}
        self.strip.set_chosen(of_axis.get(self.strip.axis))

    @on(messages.Measuring)
    def _take_measuring(self, message: messages.Measuring) -> None:
        if not message.worker.is_cancelled:
            self.say(f"Measuring ranks and tokens: {count(message.done)} of {count(message.total)} sites")

    @on(messages.PlacesReady)
    def _take_places(self, message: messages.PlacesReady) -> None:
        if not self.accept(message):
            return
        self.draw_keys()
        shown = message.grids.shown if message.grids is not None else ()
        if not shown:
            self.say(message.problem or "One rank and no token rows: there are only steps to show.")
            return
        grids = [message.source.sites, *shown]
        at = next((i for i, each in enumerate(grids) if each.axis == self.strip.axis), 0)
        self._show_grid(grids[(at + 1) % len(grids)])

    @property
    def runs(self) -> dict[str, str]:
        """Path -> name of baseline and target."""
        return self.source.runs if self.source is not None else {}

    @property
    def site(self) -> str:
        """Site of the finding under the cursor."""
        return self.table.finding.site if self.table.finding is not None else ""

    @property
    def link(self) -> str:
        """Permalink of the worst element of the finding under the cursor."""
        finding, source = self.table.finding, self.source
        return source.link(finding) if finding is not None and source is not None else ""

    def open_link(self, at: Permalink) -> None:
        """Show the finding that a permalink refers to, and its values if the link has an index and names the target.

        If there is no finding for the site, show a message, with the cursor on the culprit.
        """
        source = self.source
        if source is None:
            return
        sides = ((finding, side) for finding in source.report.findings for side in (finding.target, finding.baseline))
        target = next((finding for finding, side in sides if side is not None and side.site == at.site), None)
        if target is None:
            self._sentence = f"No finding of {at.site}: it is not in this comparison."
        step = at.step if at.step in source.steps else None
        self.ask(DiffQuery(step=step), target=target or source.culprit)
        if target is not None and at.index is not None and at.run == source.report.target.name:
            self.track(self.load_table(source, target, at))

    @on(messages.OpenFailed)
    def _take_failure(self, message: messages.OpenFailed) -> None:
        if not self.accept(message):
            return
        if self._old is None:
            self.app.exit(message.error)
            return
        self.source, self._old, self.way = self._old, None, self._last_way
        self.query_one(StatusBar).set_header(self.source.header)
        self._sentence = f"comparison failed, showing the previous one: {message.error}"
        self.ask(self.query_now, target=self._target)

    @on(messages.FindingsReady)
    def _take_findings(self, message: messages.FindingsReady) -> None:
        if not self.accept(message):
            return
        self.table.empty_text = self._empty_text()
        wanted = self._target.order if self._target else -1
        self.table.set_findings(message.findings, wanted, self.query_now.step, fold=self.query_now.folds)
        self._draw_title()
        self.show_finding()

    @on(messages.TokenViewReady)
    def _take_token_view(self, message: messages.TokenViewReady) -> None:
        if self.accept(message) and message.finding is self.table.finding:
            self.pair.set_token_view(message.token_view)

    @on(messages.TokenViewFailed)
    def _take_token_view_failure(self, message: messages.TokenViewFailed) -> None:
        if self.accept(message) and message.finding is self.table.finding:
            self.pair.set_token_view(None, f"The values cannot be read: {message.error}")

    @on(messages.DetailReady)
    def _take_detail(self, message: messages.DetailReady) -> None:
        if self.accept(message) and message.finding is self.table.finding:
            nothing = "" if message.detail else "Nothing to measure: the values are equal, or were not kept."
            self.pair.set_detail(message.detail, message.problem or nothing)

    # --- questions --------------------------------------------------------------------------------

    def ask(self, query: DiffQuery, target: Finding | None = None) -> None:
        """Show the findings of ``query``, with the cursor on ``target`` or on the current finding."""
        if self.source is None:
            return
        self.query_now, self._target = query, target or self.table.finding or self._target
        self._mark_column()
        self.track(self.load_findings(self.source, query))

    def show_finding(self) -> None:
        """Show the measures immediately; the token view from the cache, or after the cursor has rested."""
        finding, source = self.table.finding, self.source
        self.cancel_rest()
        self.draw_keys()
        if finding is None or source is None:
            self.pair.show(None, None, (), "")
            return
        self.strip.keep_in_sight(group_of(finding.site)[0])
        answer = source.answer if finding is source.culprit else ()
        known, token_view = source.cached(finding)
        is_known = known or finding.basis != "values"
        self.pair.show(finding, self.query_now.step, answer, "" if is_known else "Reading values ...", token_view)
        self.show_detail()
        if not is_known:
            self.track_after(REST_S, partial(self.load_token_view, source, finding))

    def show_detail(self) -> None:
        """Measure the finding in detail if the detail view is open."""
        finding, source = self.table.finding, self.source
        if self.pair.view == "detail" and self.pair.detail is None and finding is not None and source is not None:
            self.pair.set_detail(None, "Measuring ...")
            self.track(self.load_detail(source, finding))

    @on(RowList.Moved, "#findings")
    def _finding_moved(self) -> None:
        self.show_finding()

    @on(RowList.Moved, "#layers")
    def _layer_moved(self) -> None:
        order = self.strip.order
        target = self.source.report.findings[order] if self.source is not None and order is not None else None
        query = replace(self.query_now, group=self.strip.group, path=self.strip.path, find="")
        if target is not None and not target.verdict.is_bad:
            query = replace(query, only_bad=False)
        self.ask(query if target is None else replace(query, fold=False), target=target)

    # --- words ------------------------------------------------------------------------------------

    def _draw_title(self) -> None:
        query, source = self.query_now, self.source
        if source is None:
            return
        group = next((row.label for row in source.layers.rows if row.name == query.group), "everything")
        group = query.path or group
        words = [f'find "{query.find}"' if query.find else group]
        words += [f"step {query.step}"] if query.step is not None else []
        words += [f"rank {query.rank}"] if query.rank is not None else []
        words += ["only bad"] if query.only_bad else []
        amount = f"{count(self.table.num_rows)} of {plural(len(source.report.findings), 'finding')} · {query.order}"
        self.table.set_title(" · ".join(words), amount)

    def _empty_text(self) -> str:
        query, source = self.query_now, self.source
        if query.find:
            return f'No site matches "{query.find}" here. Press esc to end the search.'
        if query.only_bad and source is not None:
            if not source.report.num_bad:
                return "\n".join(
                    [
                        "No differences. Press d to list all findings.",
                        "",
                        *(f"{fact.label:<{LABEL}}{fact.text}" for fact in source.answer),
                    ]
                )
            return "No differences here. Press d to list all findings, f to go to the culprit."
        return "Nothing was compared here. Press [ or ] for another step, or choose another layer."

    def draw_keys(self) -> None:
        """Show the keys that currently have an effect."""
        source, query = self.source, self.query_now
        if source is None:
            return
        bad = source.report.num_bad > 0
        works = {
            "culprit": bad,
            "next_cause": len(source.report.divergences) > 1,
            "next_bad": bad,
            "downstream": query.only_bad and any(f.role == "downstream" for f in source.report.findings),
            "previous_step": len(source.steps) > 1,
            "next_step": len(source.steps) > 1,
            "previous_rank": len(source.ranks) > 1,
            "next_rank": len(source.ranks) > 1,
            "go": len(source.steps) > 2,
            "view": self.table.finding is not None,
            "sort": self.table.num_rows > 1,
            "back": self.has_class("-zoomed") or bool(query.find),
            "reload": any(h.is_open for h in (source.report.baseline, source.report.target)),
        }
        shown = [s for s in self.specs if s.label and works.get(s.id, True)]
        self.bar.set_keys(shown)
        if self._sentence:
            self.say(self._sentence)
            self._sentence = ""
