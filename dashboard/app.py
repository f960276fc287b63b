"""The Textual app: themes, keys, and the screen to begin with."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from textual.app import App, SystemCommand
from textual.screen import Screen

from tapscope.dashboard.keys import effective, parse_overrides
from tapscope.dashboard.screens.browse import BrowseScreen
from tapscope.dashboard.sources import RunSource
from tapscope.dashboard.theme import DARK, LIGHT, NAMES
from tapscope.errors import TapscopeError
from tapscope.run import open_run


class TapscopeApp(App[TapscopeError]):
    """Shows one source. Its result is the error that ended it, or None."""

    CSS_PATH = "app.tcss"
    TITLE = "tapscope"

    def __init__(self, open_source: Callable[[], RunSource], *, theme: str = "dark", keys: Iterable[str] = ()) -> None:
        """``keys`` are ``ID=KEYS`` texts; raises ConfigError for a wrong one."""
        super().__init__()
        self._open_source, self._theme_name = open_source, NAMES[theme]
        self._overrides = parse_overrides(keys)

    def on_mount(self) -> None:
        """Dress, and open the screen."""
        for theme in (DARK, LIGHT):
            self.register_theme(theme)
        self.theme = self._theme_name
        self.set_keymap(self._overrides)
        self.push_screen(BrowseScreen(self._open_source, effective(self._overrides)))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The palette offers what the keys offer, by name."""
        for spec in effective(self._overrides):
            if isinstance(screen, BrowseScreen) and spec.id != "palette":
                run = partial(screen.run_action, spec.action)
                yield SystemCommand(f"{spec.id.replace('_', ' ')} ({spec.shown})", spec.help, run)


def browse(path: str | Path, *, theme: str = "dark", keys: Iterable[str] = ()) -> int:
    """Browse the run at ``path`` until the user quits; returns the exit code.

    Raises the errors of :func:`tapscope.run.open_run`, and ConfigError for a wrong key.
    """
    open_run(path).close()
    app = TapscopeApp(lambda: RunSource(open_run(path)), theme=theme, keys=keys)
    error = app.run()
    if error is not None:
        raise error
    return app.return_code or 0
