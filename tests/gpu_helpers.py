"""What the tests on a GPU share."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def never_waiting() -> Iterator[None]:
    """Every call of torch that would wait for the device raises here."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(action="ignore"):  # it says that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
