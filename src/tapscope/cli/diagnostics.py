"""All output to stderr (notes, warnings, errors, progress), and the exit codes."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum

from tapscope.cli import output
from tapscope.core.formatting import printable, size


class ExitCode(IntEnum):
    """The exit codes of every command."""

    OK = 0
    DIFFERENT = 1
    USAGE = 2
    DATA = 3
    LIVE = 4
    INTERRUPTED = 130
    PIPE_CLOSED = 141
    """The reader closed the pipe, e.g. `| head`; equals the exit code of a process killed by SIGPIPE."""


_quiet = False
_PROGRESS_S = 60.0
"""Interval in seconds between progress lines when stderr is not a terminal."""


def configure(*, quiet: bool) -> None:
    """Apply ``--quiet``; called by main."""
    global _quiet
    _quiet = quiet


def note(text: str) -> None:
    """Print a note, e.g. the suggested next command; suppressed by --quiet."""
    if not _quiet:
        _write(text)


def warn(text: str) -> None:
    """Print a warning about missing or unusual data, even with --quiet."""
    _write(f"tapscope: warning: {text}")


def error(text: str) -> None:
    """Print a one-line error: what is wrong, where, and what would work."""
    _write(f"tapscope: error: {text}")


@contextmanager
def progress(total: int, label: str) -> Iterator[Callable[[int], None]]:
    """Context manager: show a transient progress bar if stderr is a terminal; yields ``advance(n)``."""
    if _quiet or not sys.stderr.isatty():
        yield lambda n: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, refresh_per_second=10) as bar:
        task = bar.add_task(label, total=total)
        yield lambda n: bar.advance(task, n)


@contextmanager
def byte_progress(label: str) -> Iterator[Callable[[int, int, int, int], None]]:
    """Context manager: show progress in sites and bytes; yields ``show(sites done, all sites, bytes done, all bytes)``.

    On a terminal a transient bar with rate and remaining time, otherwise one line per minute.
    """
    if _quiet:
        yield lambda *done: None
        return
    if not sys.stderr.isatty():
        yield _ProgressLines(label).show
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    sites = TextColumn("{task.description} {task.fields[sites]} sites")
    columns = sites, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=10) as bar:
        task = bar.add_task(label, total=None, sites="")

        def show(num: int, total: int, nbytes: int, num_bytes: int) -> None:
            bar.update(task, completed=nbytes, total=num_bytes, sites=f"{num:,}/{total:,}")

        yield show


class _ProgressLines:
    """Prints at most one progress line per minute."""

    def __init__(self, label: str) -> None:
        self._label, self._begin = label, time.monotonic()
        self._next = self._begin + _PROGRESS_S

    def show(self, num: int, total: int, nbytes: int, num_bytes: int) -> None:
        """Print a line if a minute has passed since the last line."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _PROGRESS_S
        seconds = round((now - self._begin) * (num_bytes / nbytes - 1)) if nbytes else 0
        left = f", about {timedelta(seconds=seconds)} left" if nbytes else ""
        sizes = f"{size(nbytes)} of {size(num_bytes)}"
        note(f"{self._label}: {num:,} of {total:,} sites, {sizes}{left}")


def _write(text: str) -> None:
    """Write to stderr with control characters made visible.

    Lines after the first are indented, so that a name with a newline cannot imitate a message.
    """
    output.flush()
    print("\n  ".join(map(printable, text.split("\n"))), file=sys.stderr, flush=True)
