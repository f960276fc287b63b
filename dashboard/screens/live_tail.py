"""Following of an open run: the browse screen reads the run again as it grows."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from textual import on

from tapscope.dashboard import messages
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.screens.browse_workers import BrowseWorkersScreen
from tapscope.dashboard.widgets.status_bar import StatusBar

FOLLOW_S = 1.0
"""Minimum interval in seconds between checks of a followed run for growth."""


class LiveTailScreen(BrowseWorkersScreen):
    """Browse screen that follows an open run; reloads take at most a third of the time."""

    source: RunSource | None = None
    following = False
    """Whether the open run is followed: reloaded as it grows, with the last step shown."""
    _open: Callable[[], RunSource]
    _sentence = ""

    def say_next(self, sentence: str) -> None:
        """Show a message together with the next record."""
        self._sentence = sentence

    def action_reload(self) -> None:
        """Read the run again."""
        self.track(self.load_source(self._open))

    def action_tail(self) -> None:
        """Start following the run, or stop."""
        source = self.source
        if source is None:
            return
        if self.following:
            self.stay()
            self.say("Stopped following the run.")
        elif not source.is_open:
            self.say("This run is closed: nothing will be added.")
        elif not source.may_grow:
            self.say("No recorder writes to this run any more.")
        else:
            self.following = True
            self.draw_keys()
            self.action_reload()

    def stay(self) -> None:
        """Stop following, because the user chose a step."""
        if self.following and self.source is not None:
            self.following = False
            self.query_one(StatusBar).set_header(self.source.header)

    def follow(self, source: RunSource, seconds: float) -> None:
        """Schedule the next check for growth if the run is followed; waits twice ``seconds``, at least FOLLOW_S."""
        was_following, self.following = self.following, self.following and source.is_open
        if was_following and not self.following:
            self.say_next("The run is complete.")
        if self.following:
            header = source.header
            self.query_one(StatusBar).set_header(replace(header, state=header.state.replace("OPEN", "FOLLOWING")))
            self.call_after(max(FOLLOW_S, 2 * seconds), partial(self.look_for_more, source))

    @on(messages.RunExtended)
    def _take_growth(self, message: messages.RunExtended) -> None:
        if not self.following or message.source is not self.source:
            return
        if message.has_grown:
            self.track(self.load_source(self._open))
        else:
            self.call_after(FOLLOW_S, partial(self.look_for_more, message.source))
