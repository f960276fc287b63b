"""Garbage: when Python need not look for any."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Records and findings are made by the hundred thousand and stay: to look for garbage among them costs more than
    they do."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
