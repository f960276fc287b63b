"""Textual application: themes, key bindings and the initial screen."""

import gc
from asyncio import get_running_loop
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from textual.app import App, SystemCommand
from textual.screen import Screen

from tapscope.core.errors import TapscopeError
from tapscope.dashboard.background import DaemonThreads
from tapscope.dashboard.bookmarks import Bookmarks, bookmarks_path
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.capture_control import CaptureControl
from tapscope.dashboard.column_choice import ColumnChoice, columns_path
from tapscope.dashboard.keymap import DIFF_KEYS, KEYS, parse_overrides
from tapscope.dashboard.keys_file import keys_path, read_keys
from tapscope.dashboard.model.permalink import Permalink
from tapscope.dashboard.screens.browse import BrowseScreen
from tapscope.dashboard.screens.keymap_screen import KeymapScreen
from tapscope.dashboard.theme import ANSI, DARK, LIGHT, NAMES
from tapscope.sources import require_run

if TYPE_CHECKING:
    from tapscope.comparator import CompareOptions
    from tapscope.dashboard.compare_settings import CompareSettings
    from tapscope.dashboard.diff_source import DiffSource
    from tapscope.dashboard.screens.diff_workers import Open


class TapscopeApp(App[TapscopeError]):
    """Terminal UI that browses one run or compares two. ``run()`` returns the error that ended the app, or None."""

    CSS_PATH = "app.tcss"
    TITLE = "tapscope"

    def __init__(
        self,
        open_source: Callable[[], RunSource] | None = None,
        *,
        theme: str = "dark",
        keys: Iterable[str] = (),
        keys_file: Path | None = None,
        open_diff: "tuple[Open, str] | None" = None,
        at: Permalink | None = None,
        control: CaptureControl | None = None,
        bookmarks: Path | None = None,
        columns: Path | None = None,
        live: Path | None = None,
    ) -> None:
        """Configure the first screen: the run of ``open_source``, or the comparison of ``open_diff``.

        ``at`` is the place to open. ``keys`` are ``ID=KEYS`` strings and take precedence over ``keys_file``.
        ``open_diff`` is an (opener, title) pair. ``bookmarks`` and ``columns`` are the files that store bookmarks and
        chosen columns. ``live`` is the path of the run whose live screen is shown first.

        Raises ConfigError for an invalid key binding, or if the columns file cannot be read.
        """
        super().__init__()
        self._open_source, self._open_diff, self._theme_name = open_source, open_diff, NAMES[theme]
        self._at, self._control = at, control
        self._live, self._columns = live, ColumnChoice(columns)
        self._bookmarks = Bookmarks(bookmarks) if bookmarks is not None else None
        specs = KEYS if open_diff is None else DIFF_KEYS
        self._overrides = parse_overrides(
            keys, specs, file=read_keys(keys_file) if keys_file else (), where=str(keys_file)
        )

    def on_mount(self) -> None:
        """Register themes and key bindings, and push the first screen."""
        get_running_loop().set_default_executor(DaemonThreads())
        for theme in (ANSI, DARK, LIGHT):
            self.register_theme(theme)
        self.theme = self._theme_name
        self.set_keymap(self._overrides)
        first: KeymapScreen | None = None
        if self._open_diff is not None:
            from tapscope.dashboard.screens.diff import DiffScreen  # the comparator is slow to import

            first = DiffScreen(*self._open_diff, self._at)
        elif self._open_source is not None:
            first = BrowseScreen(self._open_source, self._at)
            first.control, first.live_path = self._control, self._live
        if first is not None:
            first.overrides, first.bookmarks, first.columns = self._overrides, self._bookmarks, self._columns
            self.push_screen(first)

    def on_unmount(self) -> None:
        """Unfreeze the garbage collector, which ignored the loaded run while the app was running."""
        gc.unfreeze()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Yield one command-palette entry per key of the screen, under the action's name."""
        for spec in screen.specs if isinstance(screen, KeymapScreen) else ():
            if spec.id != "palette":
                run = partial(screen.run_action, spec.action)
                yield SystemCommand(f"{spec.id.replace('_', ' ')} ({spec.shown})", spec.help, run)


def browse(
    path: str | Path,
    *,
    theme: str = "dark",
    keys: Iterable[str] = (),
    at: Permalink | None = None,
    control: CaptureControl | None = None,
    live: bool = False,
) -> int:
    """Browse the run at ``path`` in the terminal until the user quits; return the exit code.

    With ``live``, start on the screen that follows the run while it is recorded. Raises the errors of
    :func:`tapscope.sources.open_run`, and ConfigError for an invalid key binding.
    """
    require_run(path)
    return _run(
        TapscopeApp(
            lambda: RunSource.open(path),
            theme=theme,
            keys=keys,
            keys_file=keys_path(),
            at=at,
            control=control,
            bookmarks=bookmarks_path(),
            columns=columns_path(),
            live=Path(path) if live else None,
        )
    )


def diff(
    baseline: Path,
    target: Path,
    options: "CompareOptions",
    *,
    theme: str = "dark",
    keys: Iterable[str] = (),
    at: Permalink | None = None,
) -> int:
    """Show the comparison of two runs in the terminal until the user quits; return the exit code.

    Raises the errors of :func:`tapscope.open_run` and :func:`tapscope.comparator.compare`, and ConfigError for an
    invalid key binding.
    """
    for path in (baseline, target):
        require_run(path)

    def open_source(way: "CompareSettings", progress: Callable[[int, int], None]) -> "DiffSource":
        from tapscope.dashboard.diff_source import DiffSource

        return DiffSource.open((baseline, target), options, progress, way)

    name = f"{baseline.name} → {target.name}"
    return _run(
        TapscopeApp(
            theme=theme,
            keys=keys,
            keys_file=keys_path(),
            open_diff=(open_source, name),
            at=at,
            bookmarks=bookmarks_path(),
            columns=columns_path(),
        )
    )


def _run(app: TapscopeApp) -> int:
    error = app.run()
    if error is not None:
        raise error
    return app.return_code or 0
