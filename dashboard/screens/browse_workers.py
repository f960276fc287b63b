"""Workers of the browse screen: each computes in a thread and posts one message."""

import gc
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from textual import work

from tapscope.core.errors import TapscopeError
from tapscope.dashboard.browse_source import Query, RunSource
from tapscope.dashboard.capture_control import CaptureControl, attempt
from tapscope.dashboard.export import export
from tapscope.dashboard.messages import (
    AccountReady,
    CountsReady,
    DigestFailed,
    DigestReady,
    ModulesReady,
    OpenFailed,
    RecordsReady,
    RunExtended,
    SeriesReady,
    SourceOpened,
    StatusMessage,
    TableOpened,
)
from tapscope.dashboard.model.permalink import Permalink
from tapscope.dashboard.model.series import metric_series, site_series
from tapscope.dashboard.screens.keymap_screen import KeymapScreen
from tapscope.run_format.record import Record


class BrowseWorkersScreen(KeymapScreen):
    """Base of the browse screen with its worker threads. Workers do not touch widgets; handlers drop outdated
    results."""

    control: CaptureControl | None = None
    """Capture control of a live job, set by ``view --control``."""

    @work(thread=True, group="control")
    def switch_capture(self, control: CaptureControl, text: str) -> None:
        """Apply a capture command on all ranks and report the result."""
        self.post_message(StatusMessage(attempt(control, text)))

    @work(thread=True, exclusive=True, group="open")
    def load_source(self, open_source: Callable[[], RunSource]) -> None:
        """Open the run and read its index."""
        begun = monotonic()
        try:
            source = open_source()
            took = monotonic() - begun
            gc.freeze()  # otherwise garbage collections scan the whole run and delay key presses
            self.post_message(SourceOpened(source, took))
        except TapscopeError as error:
            self.post_message(OpenFailed(error))

    @work(thread=True, exclusive=True, group="grown")
    def look_for_more(self, source: RunSource) -> None:
        """Check whether the run has grown since it was opened."""
        self.post_message(RunExtended(source, source.has_grown()))

    @work(thread=True, exclusive=True, group="records")
    def load_records(self, source: RunSource, query: Query) -> None:
        """Select and sort the records of a query."""
        self.post_message(RecordsReady(query, source.records(query)))

    @work(thread=True, exclusive=True, group="counts")
    def load_counts(self, source: RunSource, step: int, rank: int) -> None:
        """Count records and anomalies per module."""
        self.post_message(CountsReady(source.counts(step, rank)))

    @work(thread=True, exclusive=True, group="digest")
    def load_digest(self, source: RunSource, record: Record) -> None:
        """Read one tensor and compute its digest."""
        try:
            self.post_message(DigestReady(record, source.digest(record)))
        except TapscopeError as error:
            self.post_message(DigestFailed(record, error))

    @work(thread=True, group="export")
    def export_record(self, source: RunSource, record: Record) -> None:
        """Export one tensor to the working directory."""
        try:
            self.post_message(StatusMessage(export(source.run, record, Path.cwd())))
        except (TapscopeError, OSError) as error:
            self.post_message(StatusMessage(f"the tensor cannot be written here: {error}"))

    @work(thread=True, exclusive=True, group="account")
    def load_account(self, source: RunSource) -> None:
        """Summarize the run."""
        self.post_message(AccountReady(source.account()))

    @work(thread=True, exclusive=True, group="table")
    def load_table(self, source: RunSource, record: Record, at: Permalink | None = None) -> None:
        """Open the value table of a record.

        The cursor starts at the index of ``at`` if given, else at the first non-finite value, if any.
        """
        from tapscope.dashboard.model.value_search import find  # slow to import, as everything on the tensor screen

        try:
            table, place = source.table(record), (0, 0)
            if at is not None:
                place = table.place_of(at)
            elif record.stats is not None and record.stats.nonfinite:
                place = find(table, 0, -1) or place
            self.post_message(TableOpened(table, record.key.site, place=place))
        except TapscopeError as error:
            self.post_message(TableOpened(None, record.key.site, str(error)))

    @work(thread=True, exclusive=True, group="modules")
    def load_modules(self, source: RunSource, step: int, rank: int) -> None:
        """Build the module graph of one step on one rank."""
        graph = source.module_graph(step, rank)
        self.post_message(ModulesReady(graph, lambda site: Permalink(source.run.name, site, step, rank)))

    @work(thread=True, exclusive=True, group="series")
    def load_series(self, source: RunSource, site: str) -> None:
        """Compute the series of a site over all steps, and of the run's metrics."""
        self.post_message(SeriesReady(site, (site_series(source, site), metric_series(source))))
