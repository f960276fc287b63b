"""Base of the browse screen: site tree, records and tensor of one run, and the handling of worker results."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from tapscope.core.formatting import count, plural, size
from tapscope.dashboard import messages
from tapscope.dashboard.bookmarks import path_text
from tapscope.dashboard.browse_source import BIG_TENSOR_BYTES, Query, RunSource
from tapscope.dashboard.keymap import RECORDS
from tapscope.dashboard.live_run import LiveRun
from tapscope.dashboard.model.permalink import Permalink
from tapscope.dashboard.model.run_data import Header
from tapscope.dashboard.screens.live_tail import FOLLOW_S, LiveTailScreen
from tapscope.dashboard.widgets.line_input import LineInput
from tapscope.dashboard.widgets.record_table import RecordTable
from tapscope.dashboard.widgets.row_list import RowList
from tapscope.dashboard.widgets.site_tree import SiteTree
from tapscope.dashboard.widgets.status_bar import KeyBar, StatusBar
from tapscope.dashboard.widgets.tensor_pane import TensorPane
from tapscope.render import record_text
from tapscope.run_format.record import Key
from tapscope.run_format.records import Records

REST_S = 0.15
"""Delay in seconds after a cursor move until a tensor is read."""


class BrowseBaseScreen(LiveTailScreen):
    """Browse screen without actions, which are in BrowseScreen.

    The state is one query and one record; panes display it and workers compute results.
    """

    AUTO_FOCUS = ""
    live_path: Path | None = None
    """Run whose live screen is shown first, set by ``view --live``."""
    HORIZONTAL_BREAKPOINTS = [(0, "-single"), (60, "-narrow"), (100, "-wide")]  # noqa: RUF012

    def __init__(self, open_source: Callable[[], RunSource], at: Permalink | None = None) -> None:
        """``at`` is the place to open, by default the first record."""
        super().__init__(classes="-at-records")
        self._open, self._at = open_source, at
        self.source: RunSource | None = None
        self.query_now: Query | None = None
        self.pane = RECORDS
        self._target: Key | None = None
        self._series_source: RunSource | None = None
        """The source from which the current series were requested."""
        self._keeps_sentence = False
        """Whether the query changed because a followed run grew, without a key press; the current message then
        stays."""

    def compose(self) -> ComposeResult:
        """Yield header, three panes, input lines, and key bar."""
        yield StatusBar()
        with Horizontal(id="panes"):
            yield SiteTree()
            with Vertical(id="right"):
                yield RecordTable()
                yield TensorPane()
        yield LineInput(placeholder="mlp *proj:out is:nonfinite max:>100 layer:0..3 -dtype:fp8", id="find")
        yield LineInput(id="line")
        yield KeyBar()

    def on_mount(self) -> None:
        """Start reading the run."""
        self.sites = self.query_one(SiteTree)
        self.table = self.query_one(RecordTable)
        self.tensor = self.query_one(TensorPane)
        self.bar = self.query_one(KeyBar)
        self.query_one(StatusBar).set_header(Header("", (), "READING", ()))
        if self.live_path is not None:
            self.show_live(self.live_path, self.live_path.name)
        self.table.empty_text = "Reading the run ..."
        self.show_chosen_columns(self.table)
        self.table.focus()
        self.track(self.load_source(self._open))

    def show_live(self, path: Path, name: str) -> None:
        """Open the live screen of the run."""
        from tapscope.dashboard.screens.live import LiveScreen

        self.push(LiveScreen(LiveRun(path), name, self.control))

    # --- answers of the workers -------------------------------------------------------------------

    @on(messages.SourceOpened)
    def _take_source(self, message: messages.SourceOpened) -> None:
        if not self.accept(message):
            message.source.close()
            return
        before, self.source, source = self.source, message.source, message.source
        if before is not None:
            before.close()
            more = len(source.run.records) - len(before.run.records)
            if not self.following:
                self.say_next(f"reloaded: {plural(more, 'new record')}" if more else "reloaded: no new records")
        self.query_one(StatusBar).set_header(source.header)
        self.follow(source, message.seconds)
        self.sites.set_tree(source.modules[""], str(source.run.manifest.get("model") or "all modules"))
        self.sites.set_title("sites")
        old = self.query_now
        first = source.run.records[0].key if source.run.records else None
        step = old.step if old else first.step if first else next(iter(source.steps), 0)
        rank = old.rank if old else first.rank if first else next(iter(source.ranks), 0)
        if self.following and source.steps:
            old = replace(old or Query(step, rank), step=source.steps[-1])
        self.query_now = None
        if self._at is not None:
            at, self._at = self._at, None
            self.open_link(at)
            return
        self.ask(replace(old or Query(step, rank), path=self.sites.path))

    @property
    def runs(self) -> dict[str, str]:
        """Path -> name of the run on the screen."""
        return {path_text(self.source.run.path): self.source.run.name} if self.source is not None else {}

    @property
    def link(self) -> str:
        """Permalink of the record under the cursor."""
        record, source = self.table.record, self.source
        if record is None or source is None:
            return ""
        return str(Permalink(source.run.name, record.key.site, record.key.step, record.key.rank))

    def open_link(self, at: Permalink) -> None:
        """Show the record that a permalink refers to; with an index, also its values with the cursor at the index."""
        source = self.source
        if source is None:
            return
        self.stay()
        record = next(iter(source.of_site(at.site, at.step, at.rank)), None)
        if record is None:
            self.say_next(f"No record of {at.site} in step {at.step} on rank {at.rank}.")
        self.sites.reveal("")
        self.ask(Query(at.step, at.rank, path=self.sites.path), target=record.key if record is not None else None)
        if record is not None and at.index is not None and record.entry is not None:
            self.track(self.load_table(source, record, at))

    @on(messages.OpenFailed)
    def _take_failure(self, message: messages.OpenFailed) -> None:
        if not self.accept(message):
            return
        if self.source is None:
            self.app.exit(message.error)
            return
        self.say(f"reload failed, showing the previous state: {message.error}")
        if self.following:
            self.call_after(FOLLOW_S, partial(self.look_for_more, self.source))

    @on(messages.CountsReady)
    def _take_counts(self, message: messages.CountsReady) -> None:
        if self.accept(message):
            self.sites.set_counts(message.counts)

    @on(messages.RecordsReady)
    def _take_records(self, message: messages.RecordsReady) -> None:
        query, source = message.query, self.source
        if not self.accept(message) or source is None:
            return
        records = message.records
        self.table.empty_text = "" if records else self._empty_text(source, query)
        self.table.set_records(records, "" if query.find else query.path, _cursor(records, self._target))
        self._draw_title(source, query)
        if self._keeps_sentence and not self._sentence:
            self.say_next(self.bar.said)
        self.show_record()

    @on(messages.DigestReady)
    def _take_digest(self, message: messages.DigestReady) -> None:
        if self.accept(message) and message.record is self.table.record:
            self.tensor.set_digest(message.digest)

    @on(messages.DigestFailed)
    def _take_digest_failure(self, message: messages.DigestFailed) -> None:
        if self.accept(message) and message.record is self.table.record:
            self.tensor.set_digest(None, f"The values cannot be read: {message.error}")

    # --- questions --------------------------------------------------------------------------------

    def ask(self, query: Query, target: Key | None = None) -> None:
        """Show the records of ``query``, with the cursor on ``target`` or on the current site."""
        old, record = self.query_now, self.table.record
        if (query == old and target is None) or self.source is None:
            return
        self.query_now = query
        self._keeps_sentence = old is None and self.following
        self._target = target or (record.key if record else self._target)
        if old is None or (old.step, old.rank) != (query.step, query.rank):
            self.track(self.load_counts(self.source, query.step, query.rank))
        self.track(self.load_records(self.source, query))

    def show_record(self, *, allow_big: bool = False) -> None:
        """Show the statistics immediately; the values from the cache, or after the cursor has rested."""
        record, source = self.table.record, self.source
        self.cancel_rest()
        if record is None or source is None:
            self.tensor.show(None, None, [], "")
            self.draw_keys()
            return
        phase = source.phase(record.key.step, record.key.rank)
        facts = record_text.title_facts(record, source.num_firings(record), phase)
        waits = record.entry is not None and record.nbytes > BIG_TENSOR_BYTES and not allow_big
        summary = source.cached_digest(record)
        is_known = summary is not None or waits or record.entry is None
        note = "" if is_known else "Reading values ..."
        if summary is None and record.entry is None:
            note = record_text.no_values_text(record)
        elif summary is None and waits:
            note = f"The tensor has {size(record.nbytes)} on disk. Press o to read it."
        self.tensor.show(record, source.rows(record), facts, note, summary)
        self.draw_keys()
        self.show_series()
        if not is_known:
            self.track_after(REST_S, partial(self.load_digest, source, record))

    def show_series(self) -> None:
        """Load the series of the site over all steps, if that view is open."""
        record, source = self.table.record, self.source
        if self.tensor.view != "steps" or record is None or source is None:
            return
        if not self.tensor.series or self._series_source is not source:
            self._series_source = source
            self.track(self.load_series(source, record.key.site))

    @on(messages.SeriesReady)
    def _take_series(self, message: messages.SeriesReady) -> None:
        record = self.table.record
        if self.accept(message) and record is not None and message.site == record.key.site:
            self.tensor.set_series(message.series)

    @on(RowList.Moved, "#records")
    def _record_moved(self) -> None:
        self.show_record()

    @on(RowList.Moved, "#sites")
    def _site_moved(self) -> None:
        if self.query_now is not None:
            self.ask(replace(self.query_now, path=self.sites.path, find=""))

    # --- words ------------------------------------------------------------------------------------

    def _draw_title(self, source: RunSource, query: Query) -> None:
        total = source.num_records(query.step, query.rank)
        what = f'find "{query.find}"' if query.find else query.path or "all sites"
        phase = source.phase(query.step, query.rank)
        step = f"step {query.step} {phase}".rstrip()
        rank = f" · rank {query.rank}" if len(source.ranks) > 1 else ""
        amount = f"{count(self.table.num_rows)} of {plural(total, 'record')} · {query.order}"
        self.table.set_heading(f"{what} · {step}{rank}", amount)

    def _empty_text(self, source: RunSource, query: Query) -> str:
        run = source.run.path
        if not source.run.records:
            return (
                f"No records yet in {run.name}. To capture some, run: tapscope dump MODEL -o {run.name}\n"
                "If a dumper is writing here, press r to read again."
            )
        if query.find:
            return f'No site here matches "{query.find}": {source.hint()}. Press esc to end the search.'
        steps = f"step {query.step} on rank {query.rank}"
        where = f"{query.path} in {steps}" if query.path else steps
        return f"No record of {where}. Press [ or ] for another step, g in the site tree for all modules."

    def draw_keys(self) -> None:
        """Show the keys that currently have an effect."""
        source, record = self.source, self.table.record
        if source is None:
            return
        works = {
            "previous_step": len(source.steps) > 1,
            "previous_rank": len(source.ranks) > 1,
            "next_anomaly": source.num_anomalies > 0,
            "load": record is not None and record.nbytes > BIG_TENSOR_BYTES and self.tensor.digest is None,
            "view": record is not None,
            "sort": self.table.num_rows > 1,
            "back": self.has_class("-zoomed") or bool(self.query_now and self.query_now.find),
            "reload": source.is_open and not self.following,
            "tail": source.is_open,
            "capture": self.control is not None,
            "go": len(source.steps) > 2,
        }
        works |= {"next_step": works["previous_step"], "next_rank": works["previous_rank"]}
        shown = [s for s in self.specs if s.label and (not s.panes or self.pane in s.panes) and works.get(s.id, True)]
        self.bar.set_keys(shown)
        if self._sentence:
            self.say(self._sentence)
            self._sentence = ""


def _cursor(records: Records, target: Key | None) -> int:
    """Return the row of the target record, else of its site and occurrence, else of its site, else the first row."""
    if target is None:
        return 0
    rows: list[int] = records.places_of(target.site).tolist()
    same_site = [(row, records[row].key) for row in rows]
    for wanted in (target, target._replace(step=-1, rank=-1)):
        for row, key in same_site:
            if key == wanted or (wanted.step < 0 and key.occurrence == wanted.occurrence):
                return row
    return same_site[0][0] if same_site else 0
