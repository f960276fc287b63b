"""``python -m tapscope`` is the ``tapscope`` command."""

import atexit
import gc
import os
import sys
import warnings
from typing import Any

from tapscope.cli import diagnostics, main


def run() -> int:
    """Run one command line in this process, and return the exit code."""
    atexit.register(gc.freeze)  # skip the final garbage collection, which would take 50 ms
    _fill_closed_streams()
    warnings.showwarning = _show_warning
    return main()


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Print a deprecation of a flag or setting as one line, like other messages; show other warnings in Python's
    format."""
    if issubclass(category, FutureWarning):
        diagnostics.warn(str(message))
    else:
        sys.stderr.write(warnings.formatwarning(message, category, *where[:2]))


def _fill_closed_streams() -> None:
    """Open /dev/null for stdout or stderr if the caller closed them (`>&-`).

    Otherwise, the next opened file would get the descriptor number and receive the output.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        if number == 1:
            sys.stdout = open(number, "w")  # noqa: SIM115 - open until the process ends
        elif number == 2:
            sys.stderr = open(number, "w")  # noqa: SIM115
    os.close(number)


if __name__ == "__main__":
    sys.exit(run())
