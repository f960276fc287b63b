"""All output to stdout, which is reserved for data."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tapscope.core.errors import OutputError
from tapscope.core.formatting import json_line, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_UNCUT = 10_000
_color = "auto"


def configure(*, color: str) -> None:
    """Apply ``--color auto|always|never``; called by main."""
    global _color
    _color = color


def write_line(text: str) -> None:
    """Write one line with control characters made visible.

    Raises OutputError if stdout cannot be written, and BrokenPipeError if the reader closed the pipe.
    """
    with _writing():
        sys.stdout.write(printable(text) + "\n")


def write_lines(text: str) -> None:
    """Write several lines, each like :func:`write_line`."""
    for line in text.split("\n"):
        write_line(line)


def write_json(item: dict[str, Any]) -> None:
    """Write a JSON object on one line; non-finite numbers become null. Raises like :func:`write_line`."""
    write_line(json_line(item))


def is_terminal() -> bool:
    """Return whether stdout is a terminal."""
    return sys.stdout.isatty()


def is_plain() -> bool:
    """Return whether output needs no color or layout, i.e. goes to a file or pipe: then rich, a slow import, is not
    loaded."""
    return not (is_terminal() or is_coloured())


def is_coloured() -> bool:
    """Return whether to use color: from ``--color``; with ``auto`` from the environment, otherwise whether stdout is a
    terminal."""
    if _color != "auto":
        return _color == "always"
    return not os.environ.get("NO_COLOR") and (is_terminal() or bool(os.environ.get("FORCE_COLOR")))


def settle_environment() -> None:
    """Export the value of ``--color`` to NO_COLOR, for libraries that only read the environment."""
    if _color == "never":
        os.environ["NO_COLOR"] = "1"
    elif _color == "always" or not os.environ.get("NO_COLOR"):  # an empty NO_COLOR has no effect
        os.environ.pop("NO_COLOR", None)


def plain_width() -> int:
    """Return the width in columns of output to a file or pipe."""
    return _given_width() or 100


def report_width() -> int:
    """Return the width in columns of a report with long names.

    The terminal's width; in a file or pipe unlimited, so that full names can be searched, unless ``COLUMNS`` is set.
    """
    return screen_width() if is_terminal() else _given_width() or _UNCUT


def screen_width() -> int:
    """Return the terminal width in columns, like ``shutil.get_terminal_size`` but without importing shutil."""
    if given := _given_width():
        return given
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (AttributeError, ValueError, OSError):
        return 80


def _given_width() -> int:
    """Return the value of ``COLUMNS``, or 0 if it is not a number."""
    given = os.environ.get("COLUMNS", "")
    return int(given) if given.isascii() and given.isdecimal() and len(given) < 8 else 0


def console() -> "Console":
    """Return a rich console on stdout: terminal width, or :func:`plain_width` for a file or pipe; markup is
    disabled."""
    from rich.console import Console as RichConsole

    class Console(RichConsole):
        def print(self, *lines: "Text", **how: Any) -> None:
            for line in lines:
                line.plain = printable(line.plain)
            with _writing():
                super().print(*lines, **how)

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # handled by main; rich would exit with 1, which means "differs"

    terminal = is_terminal()
    return Console(
        file=sys.stdout,
        width=None if terminal else plain_width(),
        force_terminal=True if is_coloured() else None,
        no_color=not is_coloured(),
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=not terminal,
    )


def flush() -> None:
    """Flush stdout, called before anything is written to stderr; raises OutputError."""
    try:
        with _writing():
            sys.stdout.flush()
    except BrokenPipeError:
        abandon()


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        abandon()
        raise OutputError(f"the output cannot be written: {error.strerror or error}") from None


def abandon() -> None:
    """Discard all further output after the reader closed the pipe (`| head`) or the disk is full, without a traceback
    at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
