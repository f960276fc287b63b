"""Helpers for tests of Triton kernels: without a GPU, Triton's interpreter runs them, see conftest.py.

The interpreter lacks bfloat16, so only a GPU tests it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

INTERPRETED = not Path("/proc/driver/nvidia").exists()
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="here kernels are compiled for the GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Tolerance for results of order one that were summed in float32 and rounded once or twice."""


def served(device: str, dtype: torch.dtype) -> torch.dtype:
    """Return ``dtype``, or float16 instead of bfloat16 in the interpreter."""
    return torch.float16 if device == "cpu" and dtype == torch.bfloat16 else dtype


def assert_near(found: Any, expected: Any, tolerance: float | None = None) -> None:
    """Assert that ``found``, on any device, equals ``expected`` within rounding, with NaN and Inf at the same
    positions."""
    by = TOLERANCE.get(expected.dtype, 0.0) if tolerance is None else tolerance
    torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=by, atol=by, equal_nan=True)


def use_exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute tile products in float64 in Triton's interpreter, so that bits depend only on the kernel.

    By default it uses the CPU's BLAS, whose summation order may depend on the number of rows.
    """
    from triton.runtime import interpreter

    def matmul(a: Any, b: Any, dtype: Any) -> Any:
        with np.errstate(all="ignore"):
            return (a.astype(np.float64) @ b.astype(np.float64)).astype(dtype)

    class Numpy:
        def __getattr__(self, name: str) -> Any:
            return matmul if name == "matmul" else getattr(np, name)

    monkeypatch.setattr(interpreter, "np", Numpy())
