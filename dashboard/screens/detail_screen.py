"""Base of full-screen details that open over another screen and close with esc."""

from typing import ClassVar

from tapscope.dashboard.model.permalink import Permalink
from tapscope.dashboard.screens.help import HelpScreen
from tapscope.dashboard.screens.keymap_screen import KeymapScreen


class DetailScreen(KeymapScreen):
    """Detail screen. Closes with the permalink that the screen below should open, or None."""

    WORDS: ClassVar[str]
    """Explanation below the keys in the help."""

    @property
    def search_text(self) -> str:
        """Text of the active search; empty if there is none."""
        return ""

    def search(self, text: str) -> None:
        """Do nothing; subclasses with a search override this method."""

    def open_link(self, at: Permalink) -> None:
        """Close the screen and let the screen below open the permalink."""
        self.dismiss(at)

    def action_back(self) -> None:
        """Close the input line, else end the search, else close the screen."""
        is_typing = any(self.query_one(line).has_class("-open") for line in ("#line", "#find"))
        if is_typing or self.search_text:
            super().action_back()
        else:
            self.dismiss(None)

    def action_help(self) -> None:
        """Show the keys of this screen."""
        self.app.push_screen(HelpScreen(self.specs, self.pane, self.WORDS))
