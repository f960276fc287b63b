"""Helpers for tests on a GPU."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

ON_GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
"""Devices of tests that run on both; the expected values are on the CPU."""


@contextmanager
def never_waiting() -> Iterator[None]:
    """Context manager: every torch call that would synchronize with the device raises."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(action="ignore"):  # torch warns that this is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
