"""Triton's interpreter computes a product of tiles by the processor's BLAS, whose order of sums may depend on the
number of rows. Here it is computed in float64, so that bits depend on the kernel alone."""

from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        interpreter = pytest.importorskip("triton.runtime.interpreter")

        def matmul(a: Any, b: Any, dtype: Any) -> Any:
            with np.errstate(all="ignore"):
                return (a.astype(np.float64) @ b.astype(np.float64)).astype(dtype)

        class Numpy:
            def __getattr__(self, name: str) -> Any:
                return matmul if name == "matmul" else getattr(np, name)

        monkeypatch.setattr(interpreter, "np", Numpy())
