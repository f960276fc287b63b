"""Triton sketch counters against the reference."""

from typing import Any

import numpy as np
import pytest
import torch
from triton_helpers import DEVICES, INTERPRETED

pytest.importorskip("triton")

from tapscope.core.errors import UsageError
from tapscope.kernels.native.sketch import sketch_reference
from tapscope.kernels.triton import sketch as triton_sketch
from tapscope.kernels.triton.sketch import PADDING, Part, Sketches
from tapscope.run_format.sketch import COUNTERS, SketchIndex

_NOISE = torch.Generator().manual_seed(7)


def keys_of(rows: int) -> torch.Tensor:
    """Return random 32-bit keys, the second of which is padding."""
    keys = torch.randint(0, 1 << 32, (rows,), generator=_NOISE)
    if rows > 2:
        keys[1] = PADDING
    return keys


def values_of(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(rows, width, generator=_NOISE)
    values[0, 0], values[-1, -1] = float("nan"), float("inf")
    return values.to(dtype)


def expected(values: torch.Tensor, keys: torch.Tensor, part: Part) -> Any:
    kept = np.flatnonzero(keys.numpy() >= 0)
    runs = np.array([[part.first, part.column, part.num_columns]])
    index = SketchIndex(kept, keys.numpy()[kept].astype(np.uint32), runs, part.width, True)
    return sketch_reference(values.float().numpy(), index)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "width", "column"), [(1, 1, 0), (3, 256, 0), (7, 300, 0), (5, 130, 1000), (2, 700, 255), (40, 512, 256)]
)
def test_triton_sketch_equals_its_reference(
    device: str, dtype: torch.dtype, rows: int, width: int, column: int
) -> None:
    values, keys = values_of(rows, width, dtype), keys_of(rows)
    found = triton_sketch.sketch(values.to(device), keys.to(device), column)
    wanted = expected(values, keys, Part(rows, width, 0, column, width))
    np.testing.assert_allclose(found.cpu().numpy(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton_sketch_of_words_equals_that_of_elements(device: str, dtype: torch.dtype) -> None:
    """Full blocks are loaded as 8-byte words, unless they start unaligned."""
    rows, width = 40, 512
    values, keys = values_of(rows, width, dtype), keys_of(rows)
    shifted = torch.empty(rows * width + 1, dtype=dtype, device=device)[1:].view(rows, width).copy_(values)
    assert values.data_ptr() % 8 == 0
    assert shifted.data_ptr() % 8 != 0
    found = [triton_sketch.sketch(each.to(device), keys.to(device)).cpu().numpy() for each in (values, shifted)]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("device", DEVICES)
def test_triton_sketches_of_many_tensors_are_merged_together_and_again(device: str) -> None:
    """Includes column ranges; the buffer is reused for the next tensors after a merge."""
    sketches, out = Sketches(torch.device(device, 0) if device == "cuda" else torch.device(device), 5), []
    parts = [Part(9, 600, 100, 333, 280), Part(1, 2000, 0, 0, 2000), Part(3, 512, 256, 512, 256), Part(2, 5, 0, 0, 0)]
    parts += [Part(3, 515, 3, 256, 512)]
    for dtype in (torch.float16, torch.float32 if INTERPRETED else torch.bfloat16):
        made = [(values_of(part.rows, part.width, dtype), keys_of(part.rows), part) for part in parts]
        here = [(values.to(device), keys.to(device)) for values, keys, _ in made]
        counters = torch.full((5, COUNTERS), 9.0, device=device)
        for index, ((values, keys), part) in enumerate(zip(here, parts, strict=True)):
            assert sketches.has_room
            sketches.add(values, keys, part, index, counters[index].data_ptr())
        sketches.merge(5)
        out.append(counters.cpu().numpy())
        for found, inputs in zip(out[-1], made, strict=True):
            np.testing.assert_allclose(found, expected(*inputs), rtol=1e-5, atol=1e-5)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("device", DEVICES)
def test_triton_sketch_refuses_other_arguments(device: str) -> None:
    keys = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(UsageError, match="floats in contiguous rows"):
        triton_sketch.sketch(torch.zeros(2, 3, dtype=torch.int64, device=device), keys)
    with pytest.raises(UsageError, match=r"int64 \[3\]"):
        triton_sketch.sketch(torch.zeros(3, 3, device=device), keys)


def test_sketch_has_the_counters_of_the_run_format() -> None:
    assert triton_sketch.COUNTERS == COUNTERS
