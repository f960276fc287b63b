"""Triton products with 4-bit expert matrices against their reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_helpers import DEVICES, FLOATS, TOLERANCE, assert_near, served

pytest.importorskip("triton")

from tapscope.core.errors import UsageError
from tapscope.engine.checkpoint.mxfp4 import dequantize_mxfp4
from tapscope.kernels.triton.int4 import grouped_int4_linear, grouped_int4_linear_reference


def noise(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def codes_of(*shape, seed):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=10)
@given(
    counts=st.lists(st.sampled_from([0, 1, 3, 70]), min_size=1, max_size=4),
    spare=st.sampled_from([0, 5]),
    outs=st.sampled_from([16, 40]),
    size=st.sampled_from([32, 64]),
    kind=st.sampled_from(["zeros", "no zeros", "float16 scales", "mxfp4"]),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 2**31),
)
def test_grouped_int4_products_match_the_reference(device, counts, spare, outs, size, kind, dtype, seed):
    """Rows are grouped by expert; some experts have no rows, and the last rows have no expert."""
    dtype, groups, experts = served(device, dtype), 3, len(counts)
    input = noise(sum(counts) + spare, groups * size, seed=seed, dtype=dtype)
    codes, zeros = codes_of(experts, outs, groups * size // 2, seed=seed), None
    if kind == "mxfp4":
        rows, scales = None, 118 + codes_of(experts, outs, groups, seed=seed + 1) % 5
    else:
        rows = (torch.arange(outs) // 2).int()
        scales = noise(experts, int(rows[-1]) + 1, groups, seed=seed + 1).abs() * 0.01
        scales = scales.half() if kind == "float16 scales" else scales
        zeros = codes_of(*scales.shape, seed=seed) & 15 if kind == "zeros" else None
    ends = torch.tensor(counts).cumsum(0).int()
    tensors = input, codes, scales, zeros, rows, ends
    found = grouped_int4_linear(*(None if t is None else t.to(device) for t in tensors), max(*counts, 1))
    expected = grouped_int4_linear_reference(*tensors)
    assert_near(found[: sum(counts)], expected[: sum(counts)], 4 * TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
def test_every_mxfp4_number_is_exact(device):
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16)
    scales = (120 + torch.arange(16, dtype=torch.uint8)).view(1, 16, 1)
    whole = dequantize_mxfp4(blocks, scales)[0]
    ends = torch.tensor([32], dtype=torch.int32)
    tensors = torch.eye(32), blocks.flatten(-2), scales, None, None, ends
    found = grouped_int4_linear(*(None if t is None else t.to(device) for t in tensors), 32)
    assert torch.equal(found.cpu().T, whole)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_that_do_not_fit_are_refused(device):
    rows, ends = torch.zeros(16, dtype=torch.int32), torch.tensor([2, 3], dtype=torch.int32)
    right = noise(3, 64, seed=0), codes_of(2, 16, 32, seed=0), torch.ones(2, 1, 2), None, rows, ends
    wrong = {
        0: [right[0][:, 1:], right[0].double(), right[0].mT.contiguous().mT],
        1: [right[1][:1], right[1].int()],
        2: [torch.ones(2, 1, 4), torch.ones(2, 1, 2).byte(), torch.ones(1, 1, 2)],
        3: [torch.zeros(2, 1, 1, dtype=torch.uint8), torch.zeros(2, 1, 2)],
        4: [rows[1:], rows.long(), None],
        5: [ends[:1], ends.long()],
    }
    for place, tensors in wrong.items():
        for tensor in tensors:
            given_ = [tensor if i == place else each for i, each in enumerate(right)]
            with pytest.raises(UsageError):
                grouped_int4_linear(*(None if t is None else t.to(device) for t in given_), 3)
