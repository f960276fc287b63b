"""Garbage: when Python need not look for any."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Records and findings are made by the hundred thousand and stay: to look for garbage among them costs more than
    they do."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze() -> None:
    """What a server has loaded by now stays as long as it: a collection that looks through all of it (torch's modules
    and classes among it) stops everybody for a tenth of a second."""
    gc.collect()
    gc.freeze()


def trim_heap() -> None:
    """Hand free memory back to the system. Of arrays up to 32 MB glibc keeps what lies below anything in use, and fills
    it badly: of a million rows 50 MB."""
    import ctypes  # only here: the command's help needs none of it

    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)  # not in musl
