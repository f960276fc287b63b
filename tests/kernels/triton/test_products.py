"""Batch-invariant and quantised matrix products by Triton against their references."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_helpers import DEVICES, FLOATS, FP8, TOLERANCE, assert_near, served

pytest.importorskip("triton")

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.matmul import invariant_linear, invariant_linear_reference
from tapscope.kernels.triton.quant import (
    quantize_groups,
    quantize_groups_reference,
    scaled_linear,
    scaled_linear_reference,
)


def noise(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=15)
@given(
    rows=st.sampled_from([0, 1, 5, 64, 70]),
    sizes=st.sampled_from([(1, 1), (40, 33), (64, 100), (130, 256)]),
    with_bias=st.booleans(),
    is_turned=st.booleans(),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 2**31),
)
def test_matmul_matches_the_reference(device, rows, sizes, with_bias, is_turned, dtype, seed):
    dtype, (outs, ins) = served(device, dtype), sizes
    input, weight = noise(rows, ins, seed=seed, dtype=dtype), noise(outs, ins, seed=seed + 1, dtype=dtype) / ins**0.5
    bias = noise(outs, seed=seed + 2, dtype=dtype) if with_bias else None
    moved = [None if t is None else t.to(device) for t in (input, weight, bias)]
    if is_turned:
        moved[0], moved[1] = moved[0].mT.contiguous().mT, moved[1].mT.contiguous().mT
    assert_near(invariant_linear(*moved), invariant_linear_reference(input, weight, bias), TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_matmul_is_batch_invariant(device, dtype):
    dtype = served(device, dtype)
    input, weight = (noise(150, 200, seed=i, dtype=dtype).to(device) for i in range(2))
    together = invariant_linear(input, weight)
    for first, end in ((0, 1), (3, 10), (63, 66), (149, 150), (20, 150)):
        assert torch.equal(invariant_linear(input[first:end], weight), together[first:end])
    input[5] = torch.nan
    again = invariant_linear(input, weight)
    assert again[5].isnan().all()
    assert torch.equal(again[6:], together[6:])


QUANTISED = [pytest.param("cpu", torch.int8, marks=DEVICES[0].marks)]  # the interpreter stores no FP8
QUANTISED += [pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in (torch.int8, *FP8)]


@pytest.mark.parametrize(("device", "dtype"), QUANTISED)
@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (3, 416), (2, 2048)])
@pytest.mark.parametrize("group", [16, 32])
def test_quantize_groups_matches_the_reference(device, dtype, shape, group):
    input = noise(*shape, seed=1) * torch.logspace(-20, 3, shape[1])
    if len(input) > 1:
        input[1, :group] = 0.0
    found, scales = quantize_groups(input.to(device), dtype, group)
    expected, by = quantize_groups_reference(input, dtype, group)
    assert torch.equal(scales.cpu(), by)
    assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))
    wide = torch.cat((input, input), dim=1)[:, : shape[1]]
    assert torch.equal(quantize_groups(wide.to(device), dtype, group)[0], found)


@pytest.mark.parametrize(
    ("device", "dtype"), [*QUANTISED, *(pytest.param("cpu", f, marks=DEVICES[0].marks) for f in FP8)]
)
@pytest.mark.parametrize(
    ("rows", "outs", "groups", "group", "block"), [(1, 1, 1, 32, 128), (70, 200, 3, 64, 128), (5, 40, 2, 128, 16)]
)
def test_scaled_matmul_matches_the_reference(device, dtype, rows, outs, groups, group, block):
    input, scales = quantize_groups_reference(noise(rows, groups * group, seed=2), dtype, group)
    weight, _ = quantize_groups_reference(noise(outs, groups * group, seed=3), dtype, group)
    weight_scales = noise(-(-outs // block), groups, seed=4).abs() * 0.01
    expected = scaled_linear_reference(
        input, scales, weight, weight_scales.repeat_interleave(block, 0)[:outs], torch.float32
    )
    moved = [tensor.to(device) for tensor in (input, scales, weight, weight_scales)]
    found = scaled_linear(*moved, torch.float32, block=block)
    assert_near(found, expected, 1e-4 * float(expected.abs().max()))
    if rows > 1:
        alone = scaled_linear(moved[0][1:2], moved[1][1:2], *moved[2:], torch.float32, block=block)
        assert torch.equal(alone[0], found[1])


def test_matmul_refuses_invalid_arguments():
    x, scales = quantize_groups(noise(2, 64, seed=0), torch.int8, 32)
    for call in (
        lambda: invariant_linear(noise(2, 3, seed=0), noise(4, 5, seed=0)),
        lambda: invariant_linear(noise(2, 3, seed=0), noise(4, 3, seed=0).half()),
        lambda: invariant_linear(noise(2, 3, seed=0), noise(4, 3, seed=0), noise(3, seed=0)),
        lambda: quantize_groups(noise(2, 64, seed=0), torch.int16, 32),
        lambda: quantize_groups(noise(2, 60, seed=0), torch.int8, 32),
        lambda: quantize_groups(noise(2, 64, seed=0), torch.int8, 24),
        lambda: scaled_linear(x, scales[:1], x, scales, torch.float32, block=1),
        lambda: scaled_linear(x, scales, x, scales, torch.float32, block=3),
        lambda: scaled_linear(x, scales, x.float(), scales, torch.float32, block=1),
        lambda: scaled_linear(x, scales.double(), x, scales, torch.float32, block=1),
    ):
        with pytest.raises(UsageError):
            call()
