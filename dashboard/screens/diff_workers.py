"""Workers of the diff screen: each computes in a thread and posts messages."""

import gc
from collections.abc import Callable
from time import monotonic

from textual import work
from textual.message import Message

from tapscope.comparator import Finding
from tapscope.core.errors import TapscopeError
from tapscope.dashboard import messages
from tapscope.dashboard.compare_settings import CompareSettings
from tapscope.dashboard.diff_source import DiffQuery, DiffSource
from tapscope.dashboard.model.finding import link_of
from tapscope.dashboard.model.permalink import Permalink
from tapscope.dashboard.screens.keymap_screen import KeymapScreen

_PROGRESS_INTERVAL_S = 0.25

Progress = Callable[[int, int], None]
Open = Callable[[CompareSettings, Progress], DiffSource]
"""Function that opens both runs and compares them, given the settings and a progress callback."""


class DiffWorkersScreen(KeymapScreen):
    """Base of the diff screen with its worker threads. Workers do not touch widgets; handlers drop outdated results."""

    @work(thread=True, exclusive=True, group="compare")
    def load(self, open_source: Open, way: CompareSettings, known: DiffSource | None) -> None:
        """Compare the runs of ``known`` with the settings ``way``; if None, open the runs first."""
        progress = self._progress_reporter(messages.Comparing)
        try:
            source = open_source(way, progress) if known is None else known.again(way, progress)
            gc.freeze()  # otherwise garbage collections scan thousands of findings and delay key presses by 0.1 s
            self.post_message(messages.Compared(source))
        except TapscopeError as error:
            self.post_message(messages.OpenFailed(error))

    def _progress_reporter(self, message: Callable[[int, int], Message]) -> Progress:
        """Return a progress callback that posts ``message`` at most every ``_PROGRESS_INTERVAL_S`` seconds."""
        last_post = monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal last_post
            if monotonic() - last_post > _PROGRESS_INTERVAL_S:
                last_post = monotonic()
                self.post_message(message(done, total))

        return progress

    @work(thread=True, exclusive=True, group="places")
    def load_places(self, source: DiffSource) -> None:
        """Measure the heat maps by rank and token."""
        try:
            self.post_message(messages.PlacesReady(source, source.places(self._progress_reporter(messages.Measuring))))
        except TapscopeError as error:
            self.post_message(messages.PlacesReady(source, None, f"The values cannot be read: {error}"))

    @work(thread=True, exclusive=True, group="modules")
    def load_modules(self, source: DiffSource) -> None:
        """Build the module graph of the comparison."""
        by_site = {finding.site: finding for finding in source.report.findings}
        names = source.report.baseline.name, source.report.target.name
        self.post_message(messages.ModulesReady(source.modules(), lambda site: link_of(by_site[site], names)))

    @work(thread=True, exclusive=True, group="findings")
    def load_findings(self, source: DiffSource, query: DiffQuery) -> None:
        """Select and sort the findings of a query."""
        self.post_message(messages.FindingsReady(source.findings(query)))

    @work(thread=True, exclusive=True, group="token_view")
    def load_token_view(self, source: DiffSource, finding: Finding) -> None:
        """Read the token view of one finding."""
        try:
            self.post_message(messages.TokenViewReady(finding, source.token_view(finding)))
        except TapscopeError as error:
            self.post_message(messages.TokenViewFailed(finding, error))

    @work(thread=True, exclusive=True, group="detail")
    def load_detail(self, source: DiffSource, finding: Finding) -> None:
        """Measure one finding in detail."""
        try:
            self.post_message(messages.DetailReady(finding, source.detail(finding)))
        except TapscopeError as error:
            self.post_message(messages.DetailReady(finding, None, f"The values cannot be read: {error}"))

    @work(thread=True, exclusive=True, group="table")
    def load_table(
        self, source: DiffSource, finding: Finding, at: Permalink | None = None, step: int | None = None
    ) -> None:
        """Open the value table of a finding.

        The cursor starts at the index of ``at`` if given, else at the largest error, within ``step`` if given.
        """
        try:
            table, place = source.table(finding), (0, 0)
            if table is not None:
                place = table.place_of(at) if at is not None else table.cell_of(*source.worst_value(finding, step))
            self.post_message(messages.TableOpened(table, finding.site, place=place))
        except TapscopeError as error:
            self.post_message(messages.TableOpened(None, finding.site, str(error)))
