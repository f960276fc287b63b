"""Pane with the record under the cursor as statistics, histogram or values."""

from collections.abc import Sequence

from rich.text import Text

from tapscope.core.formatting import site as shorten
from tapscope.dashboard.keymap import TENSOR
from tapscope.dashboard.model.series import SiteSeries
from tapscope.dashboard.series_text import series_lines
from tapscope.dashboard.widgets.text_pane import TextPane
from tapscope.render import record_text
from tapscope.render.row_labels import RowMap
from tapscope.render.tensor_summary import Digest
from tapscope.run_format.record import Record


class TensorPane(TextPane):
    """Lower right pane of the browse screen."""

    VIEWS = ("stats", "histogram", "values", "steps")

    def __init__(self) -> None:
        super().__init__(TENSOR)
        self.record: Record | None = None
        self.digest: Digest | None = None
        self._rows: RowMap | None = None
        self._facts: list[str] = []
        self._note = ""
        self.series: tuple[SiteSeries, ...] = ()
        """Series of the site over all steps, and of the run's metrics; empty until they have been read."""

    def set_series(self, series: tuple[SiteSeries, ...]) -> None:
        """Set the series over all steps."""
        self.series = series
        self.draw()

    def show(
        self, record: Record | None, rows: RowMap | None, facts: list[str], note: str, digest: Digest | None = None
    ) -> None:
        """Show another record; a missing digest follows by :meth:`set_digest`. ``note`` is a message about the
        values."""
        if record is None or self.record is None or record.key.site != self.record.key.site:
            self.series = ()
        self.record, self._rows, self._facts, self._note, self.digest = record, rows, facts, note, digest
        self.scroll_to_top()
        self.draw()

    def set_digest(self, digest: Digest | None, note: str = "") -> None:
        """Set the digest, or the note that explains why there is none."""
        self.digest, self._note = digest, note
        self.draw()

    def title_text(self, width: int) -> str:
        """Return site, step and rank."""
        if self.record is None:
            return ""
        facts = " · ".join(self._facts)
        return f"{shorten(self.record.key.site, max(width - len(facts) - 9, 16))} · {facts}"

    def lines(self, width: int, height: int) -> Sequence[Text]:
        """Return the lines of the current view."""
        record, digest = self.record, self.digest
        if record is None:
            return [Text("Choose a record to see its tensor.", style="dim")]
        note = [Text(self._note)] if self._note else []
        if self.view == "steps":
            return series_lines(self.series, width)
        if self.view == "stats" or digest is None:
            head = record_text.what_lines(record, self._rows, width)
            stats = record_text.stats_lines(record, width) if record.dtype else []
            return [*head, *stats, *(record_text.summary_lines(digest, width) if digest else []), *note]
        if self.view == "histogram":
            return [*record_text.histogram_lines(digest.histogram, width, height), *note]
        lines = record_text.corner_lines(digest.corner, self._rows, width, max(height - 3, 5))
        lines += record_text.summary_lines(digest, width)[1:]
        if digest.around_bad is not None:
            lines += [
                Text("around it:", style="dim"),
                *record_text.corner_lines(digest.around_bad, self._rows, width, 9),
            ]
        return [*lines, *note]
