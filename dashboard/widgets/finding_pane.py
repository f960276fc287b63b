"""Pane with the finding under the cursor as measures, tokens or values."""

from collections.abc import Sequence

from rich.text import Text

from tapscope.comparator import Finding, TokenView
from tapscope.comparator.metrics.detail import Detail
from tapscope.comparator.report.answer import LABEL
from tapscope.comparator.report.width import Line, wrap_line
from tapscope.core.formatting import site as shorten
from tapscope.dashboard import finding_detail
from tapscope.dashboard.keymap import PAIR
from tapscope.dashboard.model.fact import Fact
from tapscope.dashboard.model.series import finding_series
from tapscope.dashboard.series_text import series_lines
from tapscope.dashboard.widgets.answer_bar import AnswerBar
from tapscope.dashboard.widgets.text_pane import TextPane


class FindingPane(TextPane):
    """Lower right pane of the diff screen."""

    VIEWS = ("measures", "tokens", "values", "detail", "steps")

    def __init__(self) -> None:
        super().__init__(PAIR)
        self.finding: Finding | None = None
        self.token_view: TokenView | None = None
        self.detail: Detail | None = None
        self._detail_note = ""
        self._step: int | None = None
        self._answer: Sequence[Fact] = ()
        self._note = ""

    def show(
        self,
        finding: Finding | None,
        step: int | None,
        answer: Sequence[Fact],
        note: str,
        token_view: TokenView | None = None,
    ) -> None:
        """Show another finding; a missing token view follows by :meth:`set_token_view`.

        ``answer`` is shown above the measures if the answer bar cannot show it in full. ``note`` is a message about
        the values.
        """
        self.finding, self._step, self._answer, self._note, self.token_view = finding, step, answer, note, token_view
        self.detail, self._detail_note = finding.detail if finding is not None else None, ""
        self.scroll_to_top()
        self.draw()

    def set_token_view(self, token_view: TokenView | None, note: str = "") -> None:
        """Set the token view, or the note that explains why there is none."""
        self.token_view, self._note = token_view, note
        self.draw()

    def set_detail(self, detail: Detail | None, note: str = "") -> None:
        """Set the detailed measures, or the note that explains why there are none."""
        self.detail, self._detail_note = detail, note
        self.draw()

    def title_text(self, width: int) -> str:
        """Return the site, shortened to the width."""
        return shorten(self.finding.site, max(width - 8, 16)) if self.finding else ""

    def lines(self, width: int, height: int) -> Sequence[Text]:
        """Return the lines of the current view."""
        finding, seen = self.finding, self.token_view
        if finding is None:
            return [Text("Choose a finding to see both sides.", style="dim")]
        note = [Text(self._note, style="dim")] if self._note else []
        if self.view == "steps":
            return series_lines((finding_series(finding),), width)
        if self.view == "detail":
            return finding_detail.detail_lines(self.detail) if self.detail else [Text(self._detail_note, style="dim")]
        if self.view == "measures" or seen is None:
            strip = [finding_detail.strip_line(seen, self._step, width)] if seen is not None else []
            is_cut = not self.screen.query_one(AnswerBar).is_complete
            above = [
                Text(part.plain)
                for fact in (self._answer if is_cut else ())
                for part in wrap_line(Line(f"{fact.label:<{LABEL}}{fact.text}"), width, LABEL)
            ]
            return [
                *above,
                *finding_detail.measure_lines(finding, width),
                *strip,
                *note,
                *finding_detail.note_lines(finding),
            ]
        strip = [finding_detail.strip_line(seen, self._step, width)]
        if self.view == "tokens":
            return [*strip, *finding_detail.token_lines(seen, self._step, width, height * 4)]
        return [*finding_detail.value_lines(seen, width), *strip]
