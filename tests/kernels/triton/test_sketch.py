"""The counters of a sketch by Triton against the plain reference."""

import numpy as np
import pytest
import torch
from triton_helpers import DEVICES

pytest.importorskip("triton")

from tapscope.core.errors import UsageError
from tapscope.kernels.native.sketch import sketch_reference
from tapscope.kernels.triton import sketch as triton_sketch
from tapscope.run_format.sketch import COUNTERS, SketchIndex


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "width", "column"), [(1, 1, 0), (3, 256, 0), (7, 300, 0), (5, 130, 1000), (2, 700, 255)]
)
def test_triton_sketch_equals_its_reference(
    device: str, dtype: torch.dtype, rows: int, width: int, column: int
) -> None:
    noise = torch.Generator().manual_seed(rows * width)
    values = torch.randn(rows, width, generator=noise).to(dtype)
    values[0, 0] = float("nan")
    values[-1, -1] = float("inf")
    keys = torch.randint(-(1 << 31), 1 << 31, (rows,), generator=noise).int()
    valid = torch.ones(rows, dtype=torch.int8)
    if rows > 2:
        valid[1] = 0
    found = triton_sketch.sketch(values.to(device), keys.to(device), valid.to(device), column)
    kept = np.flatnonzero(valid.numpy())
    index = SketchIndex(kept, keys.numpy().view(np.uint32)[kept], np.array([[0, column, width]]), width, True)
    np.testing.assert_allclose(found.cpu().numpy(), sketch_reference(values.numpy(), index), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_triton_sketch_refuses_other_arguments(device: str) -> None:
    keys, valid = torch.zeros(2, dtype=torch.int32, device=device), torch.ones(2, dtype=torch.int8, device=device)
    with pytest.raises(UsageError, match="contiguous floats"):
        triton_sketch.sketch(torch.zeros(2, 3, dtype=torch.int64, device=device), keys, valid)
    with pytest.raises(UsageError, match=r"int32 and int8 \[3\]"):
        triton_sketch.sketch(torch.zeros(3, 3, device=device), keys, valid)


def test_sketch_has_the_counters_of_the_run_format() -> None:
    assert triton_sketch.COUNTERS == COUNTERS
