"""Makes products in Triton's interpreter exact."""

import pytest
import torch
from triton_helpers import use_exact_products


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.importorskip("triton")
        use_exact_products(monkeypatch)
