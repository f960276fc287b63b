"""DetailScreen: a screen of one pane over another screen, which esc closes."""

from typing import ClassVar

from tapscope.dashboard.model.permalink import Permalink
from tapscope.dashboard.screens.help import HelpScreen
from tapscope.dashboard.screens.keymap_screen import KeymapScreen


class DetailScreen(KeymapScreen):
    """Closes with the link that the screen below is to open, or None."""

    WORDS: ClassVar[str]
    """What the help says below the keys."""

    @property
    def search_text(self) -> str:
        """The search; empty where nothing is filtered."""
        return ""

    def search(self, text: str) -> None:
        """Nothing is filtered, unless a subclass does."""

    def open_link(self, at: Permalink) -> None:
        """The screen below opens it."""
        self.dismiss(at)

    def action_back(self) -> None:
        """End the line at the bottom, then the search, then close the screen."""
        is_typing = any(self.query_one(line).has_class("-open") for line in ("#line", "#find"))
        if is_typing or self.search_text:
            super().action_back()
        else:
            self.dismiss(None)

    def action_help(self) -> None:
        """The keys of this screen."""
        self.app.push_screen(HelpScreen(self.specs, self.pane, self.WORDS))
