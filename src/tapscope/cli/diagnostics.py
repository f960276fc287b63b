"""The only writer of stderr: notes, warnings, errors, progress, and the meaning of exit codes."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

from tapscope.cli import output
from tapscope.core.formatting import printable


class ExitCode(IntEnum):
    """The exit codes of every command."""

    OK = 0
    DIFFERENT = 1
    USAGE = 2
    DATA = 3
    LIVE = 4
    INTERRUPTED = 130
    PIPE_CLOSED = 141
    """The reader closed the pipe, as in `| head`; the code of a command killed by SIGPIPE."""


_quiet = False


def configure(*, quiet: bool) -> None:
    """Set by main from the flags."""
    global _quiet
    _quiet = quiet


def note(text: str) -> None:
    """Print a note, such as the next command; silent with --quiet."""
    if not _quiet:
        _write(text)


def warn(text: str) -> None:
    """Print a warning about missing or unusual data, even with --quiet."""
    _write(f"tapscope: warning: {text}")


def error(text: str) -> None:
    """Print an error in one line: what, where, and what would work."""
    _write(f"tapscope: error: {text}")


@contextmanager
def progress(total: int, label: str) -> Iterator[Callable[[int], None]]:
    """A transient bar on a terminal, nothing elsewhere; yields ``advance(n)``."""
    if _quiet or not sys.stderr.isatty():
        yield lambda n: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, refresh_per_second=10) as bar:
        task = bar.add_task(label, total=total)
        yield lambda n: bar.advance(task, n)


def _write(text: str) -> None:
    """Control characters made visible; lines after the first are indented, so that no name can pass for a message."""
    output.flush()
    print("\n  ".join(map(printable, text.split("\n"))), file=sys.stderr, flush=True)
