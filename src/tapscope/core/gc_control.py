"""Control of Python's garbage collector and of free heap memory."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Context manager: pause garbage collection.

    Records and findings are created by the hundred thousand and stay alive; scanning them costs more than creating
    them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze() -> None:
    """Exempt all objects created so far from garbage collection.

    Scanning torch's modules and classes would pause a server for a tenth of a second.
    """
    gc.collect()
    gc.freeze()


def trim_heap() -> None:
    """Return free heap memory to the operating system.

    For arrays up to 32 MB, glibc keeps free memory below any live block, with heavy fragmentation: 50 MB after a run of
    a million rows.
    """
    import ctypes  # imported lazily: not needed for the help of a command

    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)  # not in musl
