"""Pausing Python's garbage collector, and returning free memory to the system."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection. Records and findings are created by the hundred thousand and stay alive, so scanning
    them costs more than creating them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze() -> None:
    """Exempt everything loaded so far from garbage collection. Scanning it (torch's modules and classes) would pause a
    server for a tenth of a second."""
    gc.collect()
    gc.freeze()


def trim_heap() -> None:
    """Return free memory to the system. Of arrays up to 32 MB glibc keeps what is below anything in use, and fills
    it badly: of a million rows 50 MB."""
    import ctypes  # only here: the command's help needs none of it

    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)  # not in musl
