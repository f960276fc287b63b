"""``python -m tapscope`` is the ``tapscope`` command."""

import atexit
import gc
import os
import sys
import warnings
from typing import Any

from tapscope.cli import diagnostics, main


def run() -> int:
    """One command line, in a process of its own."""
    atexit.register(gc.freeze)  # Python would look for garbage in all that ends with the process: 50 ms for nothing
    _fill_closed_streams()
    warnings.showwarning = _show_warning
    return main()


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Deprecated flags and settings are one line, like every other message; other warnings are shown as Python does."""
    if issubclass(category, FutureWarning):
        diagnostics.warn(str(message))
    else:
        sys.stderr.write(warnings.formatwarning(message, category, *where[:2]))


def _fill_closed_streams() -> None:
    """Where the caller closed stdout or stderr (`>&-`) what goes there is nobody's; else the next file that is opened
    would get its number, and what is printed."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        if number == 1:
            sys.stdout = open(number, "w")  # noqa: SIM115 - as long as the process
        elif number == 2:
            sys.stderr = open(number, "w")  # noqa: SIM115
    os.close(number)


if __name__ == "__main__":
    sys.exit(run())
