"""The only writer of stdout: stdout is data."""

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
    """Set by main from ``--color auto|always|never``."""
    global _color
    _color = color


def write_line(text: str) -> None:
    """One line, with control characters made visible; raises OutputError where it cannot be written, and
    BrokenPipeError where nobody reads it."""
    with _writing():
        sys.stdout.write(printable(text) + "\n")


def write_lines(text: str) -> None:
    """Several lines, each as :func:`write_line` does."""
    for line in text.split("\n"):
        write_line(line)


def write_json(item: dict[str, Any]) -> None:
    """One object on one line; non-finite numbers become null. Raises as :func:`write_line` does."""
    write_line(json_line(item))


def is_terminal() -> bool:
    """Whether somebody sees what is written."""
    return sys.stdout.isatty()


def is_plain() -> bool:
    """Whether lines go out without colour or layout, to a file or another program: then a console, which takes longest
    of all to import, is not needed."""
    return not (is_terminal() or is_coloured())


def is_coloured() -> bool:
    """What ``--color`` says; where that is ``auto`` the environment, and else whether there is a terminal."""
    if _color != "auto":
        return _color == "always"
    return not os.environ.get("NO_COLOR") and (is_terminal() or bool(os.environ.get("FORCE_COLOR")))


def settle_environment() -> None:
    """Tell a library that asks the environment alone what ``--color`` says."""
    if _color == "never":
        os.environ["NO_COLOR"] = "1"
    elif _color == "always" or not os.environ.get("NO_COLOR"):  # which means nothing where it is empty
        os.environ.pop("NO_COLOR", None)


def plain_width() -> int:
    """Columns of output that is not a terminal."""
    return _given_width() or 100


def report_width() -> int:
    """Columns of a report of long names: the screen's; to a file or another program as many as they take, so that a
    search finds them, unless ``COLUMNS`` says how many."""
    return screen_width() if is_terminal() else _given_width() or _UNCUT


def screen_width() -> int:
    """Columns of the terminal, as ``shutil.get_terminal_size`` finds them, but without loading its compressors."""
    if given := _given_width():
        return given
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (AttributeError, ValueError, OSError):
        return 80


def _given_width() -> int:
    """The value of ``COLUMNS``; 0 if it is not a number."""
    given = os.environ.get("COLUMNS", "")
    return int(given) if given.isascii() and given.isdecimal() and len(given) < 8 else 0


def console() -> "Console":
    """A rich console on stdout: the terminal's width, :func:`plain_width` elsewhere; markup is off."""
    from rich.console import Console as RichConsole

    class Console(RichConsole):
        def print(self, *lines: "Text", **how: Any) -> None:
            for line in lines:
                line.plain = printable(line.plain)
            with _writing():
                super().print(*lines, **how)

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # main knows what that means; rich would exit with 1, our word for "differs"

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
    """Everything written so far goes out before anything on stderr; raises OutputError where it cannot."""
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
    """The reader went away (`| head`), or there is no room: write the rest nowhere, without a traceback at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
