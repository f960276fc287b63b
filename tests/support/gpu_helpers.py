"""What the tests on a GPU share."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

ON_GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
"""For tests that are the same on both; what they compare with is on the CPU."""


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
