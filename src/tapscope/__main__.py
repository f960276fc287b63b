"""``python -m tapscope`` is the ``tapscope`` command."""

import atexit
import gc
import sys

from tapscope.cli import main


def run() -> int:
    """One command line, in a process of its own."""
    atexit.register(gc.freeze)  # Python would look for garbage in all that ends with the process: 50 ms for nothing
    return main()


if __name__ == "__main__":
    sys.exit(run())
