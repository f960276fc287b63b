"""Triton batch-invariant and quantized matrix products against their references."""

import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from triton_helpers import DEVICES, FLOATS, FP8, INTERPRETED, TOLERANCE, assert_near, served

pytest.importorskip("triton")

from tapscope.core.errors import UsageError
from tapscope.kernels.quantization import next_powers_of_two, quantize_reference, scaled_linear_reference
from tapscope.kernels.triton.activation import gated
from tapscope.kernels.triton.launch import num_sms
from tapscope.kernels.triton.matmul import grouped_invariant_linear, invariant_linear, invariant_linear_reference
from tapscope.kernels.triton.norm import add_rms_norm
from tapscope.kernels.triton.paged_decode import paged_decode
from tapscope.kernels.triton.quantize import Quantized, quantize
from tapscope.kernels.triton.scaled_linear import grouped_scaled_linear, quantizing_linear, scaled_linear
from tapscope.kernels.triton.scaled_linear_library import LIBRARY_ROWS


def noise(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=8)
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


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=8)
@given(
    counts=st.lists(st.sampled_from([0, 1, 3, 64, 70]), min_size=1, max_size=4),
    sizes=st.sampled_from([(40, 33), (64, 100)]),
    spare=st.sampled_from([0, 5]),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 2**31),
)
def test_grouped_matmul_has_the_bits_of_one_product_for_each_expert(device, counts, sizes, spare, dtype, seed):
    """Rows are grouped by expert; some experts have no rows, and the last rows have no expert."""
    dtype = served(device, dtype)
    input = noise(sum(counts) + spare, sizes[1], seed=seed, dtype=dtype).to(device)
    weight = noise(len(counts), *sizes, seed=seed + 1, dtype=dtype).to(device) / sizes[1] ** 0.5
    ends = torch.tensor(counts).cumsum(0).int()
    found = grouped_invariant_linear(input, weight, ends.to(device))
    for matrix, end, count in zip(weight, ends.tolist(), counts, strict=True):
        assert torch.equal(found[end - count : end], invariant_linear(input[end - count : end], matrix))
    for wrong in ((input[:, 1:], weight), (input, weight[:, :, 1:]), (input, weight.double())):
        with pytest.raises(UsageError):
            grouped_invariant_linear(*wrong, ends.to(device))
    with pytest.raises(UsageError):
        grouped_invariant_linear(input, weight, ends.long().to(device))


QUANTIZED = [pytest.param("cpu", torch.int8, marks=DEVICES[0].marks)]  # the interpreter stores no FP8
QUANTIZED += [pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in (torch.int8, *FP8)]
READ = [*QUANTIZED, *(pytest.param("cpu", dtype, marks=DEVICES[0].marks) for dtype in FP8)]


@pytest.mark.parametrize(("device", "dtype"), QUANTIZED)
@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (3, 416), (2, 2048), (3, 5000)])
@pytest.mark.parametrize("group", [16, 32, None])
def test_quantize_matches_the_reference(device, dtype, shape, group):
    input = noise(*shape, seed=1) * torch.logspace(-20, 3, shape[1])
    input = input[:, : shape[1] // (group or 1) * (group or 1)].contiguous()
    if len(input) > 1:
        input[1, : group or shape[1]] = 0.0
    if len(input) > 2:
        input[2, 3], input[2, 20] = torch.nan, torch.inf
    for scale, is_ue8m0 in itertools.product([None] if group else [None, torch.tensor(0.25)], (False, True)):
        moved = None if scale is None else scale.to(device)
        found, scales = quantize(input.to(device), dtype, group, moved, is_ue8m0=is_ue8m0)
        expected, by = quantize_reference(input, dtype, group, scale, is_ue8m0=is_ue8m0)
        assert torch.equal(scales.cpu(), by)
        both = [codes.cpu().float() for codes in (found, expected)]
        torch.testing.assert_close(*both, rtol=0, atol=0, equal_nan=True)
        wide = torch.cat((input, input), dim=1)[:, : input.shape[1]]
        again = quantize(wide.to(device), dtype, group, moved, is_ue8m0=is_ue8m0)[0]
        torch.testing.assert_close(again.cpu().float(), both[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("device", "dtype"), QUANTIZED)
@pytest.mark.parametrize(("rows", "is_ue8m0"), [(1, False), (3, True)])
def test_kernels_quantize_their_outputs(device, dtype, rows, is_ue8m0):
    """The outputs of norms, gated activations and attention equal :func:`quantize` of the plain output."""
    states, residual = (noise(rows, 384, seed=seed, dtype=torch.float16).to(device) for seed in range(2))
    pool = noise(2, 9, 16, 2, 128, seed=2, dtype=torch.float16).to(device)
    pages, lengths = (torch.arange(9 * rows, device=device).view(rows, 9) % 9).int(), torch.full((rows,), 130)
    query = noise(rows, 4, 128, seed=3, dtype=torch.float16).to(device)
    attention = query, *pool, pages, lengths.int().to(device), 0.1
    for features, compute in (
        (384, lambda more: add_rms_norm(states, residual, residual[0].contiguous(), 1e-6, quantized=more)[0]),
        (1152, lambda more: gated(states.repeat(1, 6), None, "silu", quantized=more)),
        (512, lambda more: paged_decode(*attention, num_splits=3, quantized=more).flatten(1)),
        (512, lambda more: paged_decode(*attention, num_splits=1, quantized=more).flatten(1)),
    ):
        more = Quantized.empty(rows, features, dtype, states.device, is_ue8m0)
        output = compute(more)
        assert torch.equal(output, compute(None))
        codes, scales = quantize(output, dtype, is_ue8m0=is_ue8m0)
        assert torch.equal(more.codes.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(more.scales, scales)
        with pytest.raises(UsageError):
            compute(Quantized.empty(rows, 128, dtype, states.device, is_ue8m0))


@given(scale=st.floats(2.0**-126, 2.0**127, width=32))
def test_ue8m0_scales_are_the_next_powers_of_two(scale):
    found = float(next_powers_of_two(torch.tensor([scale])))
    assert math.frexp(found)[0] == 0.5
    assert scale <= found < 2 * scale


@pytest.mark.parametrize(("device", "dtype"), READ)
@settings(max_examples=6)
@given(
    rows=st.sampled_from([0, 1, 5, 17, 130]),
    outs=st.sampled_from([1, 40, 200, 256]),
    groups=st.sampled_from([1, 2, 3, 9]),
    scaled=st.sampled_from(["groups", "block rows", "rows", "rows of one tensor", "weight-only", "weight-only blocks"]),
    with_bias=st.booleans(),
    is_constant=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(  # largest use of shared memory
    rows=130, outs=200, groups=3, scaled="weight-only", with_bias=False, is_constant=False, seed=1
)  # fmt: skip
@example(rows=1, outs=200, groups=9, scaled="groups", with_bias=True, is_constant=True, seed=1)
def test_scaled_matmul_matches_the_reference(device, dtype, rows, outs, groups, scaled, with_bias, is_constant, seed):
    is_grouped = "group" in scaled or "block" in scaled
    ins, group = (groups * 128, 128) if is_grouped else (groups * 128 - 37, None)
    plain = noise(rows, ins, seed=seed)
    input, scales = plain, None
    if not scaled.startswith("weight-only"):
        input, scales = quantize_reference(plain, dtype, 128 if scaled == "groups" else None)
    weight, _ = quantize_reference(noise(outs, ins, seed=seed + 1), dtype, None)
    high, tile = {"groups": (128, 128), "rows of one tensor": (outs, 128)}.get(scaled, (24, 8))
    by = (torch.arange(outs) // high).int()
    weight_scales = noise(int(by[-1]) + 1, groups if group else 1, seed=seed + 2).abs() * 0.01
    bias = noise(outs, seed=seed + 3) if with_bias else None
    expected = scaled_linear_reference(input, scales, weight, weight_scales, by, torch.float32, group=group, bias=bias)
    moved = [None if t is None else t.to(device) for t in (input, scales, weight, weight_scales, by)]
    moved_bias = None if bias is None else bias.to(device)
    options = {"group": group, "tile": tile, "bias": moved_bias, "is_constant": is_constant}
    found = scaled_linear(*moved, torch.float32, **options)
    assert_near(found, expected, 1e-4 * max(1e-3, float(expected.abs().max())) if rows else 0)


@pytest.mark.parametrize(("device", "dtype"), READ)
@pytest.mark.parametrize(("outs", "ins"), [(90, 8320), (8300, 384)])
def test_one_row_of_a_large_weight_matches_the_reference(device, dtype, outs, ins):
    """A weight with long rows or with many rows has its own launch; neither size is a multiple of a block."""
    outs = min(outs, 48 * num_sms(torch.device(device)) + 40)
    input, scales = quantize_reference(noise(1, ins, seed=1), dtype, 128)
    weight, weight_scales = noise(outs, ins, seed=2).to(dtype), noise(-(-outs // 128), ins // 128, seed=3).abs()
    plain = input, scales, weight, weight_scales, (torch.arange(outs) // 128).int()
    expected = scaled_linear_reference(*plain, torch.float32, group=128)
    for is_constant in (False, True):
        output = scaled_linear(*(t.to(device) for t in plain), torch.float32, tile=128, is_constant=is_constant)
        assert_near(output, expected, 1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(("device", "dtype"), READ)
@settings(max_examples=6)
@given(
    counts=st.lists(st.sampled_from([0, 1, 3, 40]), min_size=1, max_size=4),
    spare=st.sampled_from([0, 5]),
    outs=st.sampled_from([40, 200]),
    scaled=st.sampled_from(["groups", "block rows", "rows", "weight-only", "weight-only blocks"]),
    seed=st.integers(0, 2**31),
)
def test_grouped_scaled_matmul_matches_the_reference(device, dtype, counts, spare, outs, scaled, seed):
    """Rows are grouped by expert; some experts have no rows, and the last rows have no expert."""
    ins, group = (256, 128) if "group" in scaled or "block" in scaled else (91, None)
    input, scales = noise(sum(counts) + spare, ins, seed=seed), None
    if not scaled.startswith("weight-only"):
        input, scales = quantize_reference(input, dtype, 128 if scaled == "groups" else None)
    weight = quantize_reference(noise(len(counts) * outs, ins, seed=seed + 1), dtype, None)[0].view(-1, outs, ins)
    high, tile = (128, 128) if scaled == "groups" else (24, 8)
    by, ends = (torch.arange(outs) // high).int(), torch.tensor(counts).cumsum(0).int()
    weight_scales = noise(len(counts), int(by[-1]) + 1, -(-ins // (group or ins)), seed=seed + 2).abs() * 0.01
    moved = [None if t is None else t.to(device) for t in (input, scales, weight, weight_scales, by, ends)]
    most = max(*counts, 1)
    found = grouped_scaled_linear(*moved, most, torch.float32, group=group, tile=tile).cpu()
    for expert, end in enumerate(ends.tolist()):
        rows = slice(end - counts[expert], end)
        own = input[rows], None if scales is None else scales[rows], weight[expert], weight_scales[expert]
        expected = scaled_linear_reference(*own, by, torch.float32, group=group)
        assert_near(found[rows], expected, 1e-4 * max(1e-3, float(expected.abs().max())) if counts[expert] else 0)


@pytest.mark.parametrize(("device", "dtype"), READ)
def test_scaled_matmul_keeps_nonfinite_values_in_their_row(device, dtype):
    weight, _ = quantize_reference(noise(20, 256, seed=1), dtype, None)
    weight, scale, by = weight.to(device), torch.ones(1, 1, device=device), torch.zeros(20, dtype=torch.int32)
    input, by = noise(5, 256, seed=2), by.to(device)
    plain = scaled_linear(input.to(device), None, weight, scale, by, torch.float32, group=None)
    input[3, 7] = torch.nan
    found = scaled_linear(input.to(device), None, weight, scale, by, torch.float32, group=None)
    assert found[3].isnan().all()
    assert torch.equal(found[[0, 1, 2, 4]], plain[[0, 1, 2, 4]])


@pytest.mark.parametrize(("device", "dtype"), QUANTIZED)
@pytest.mark.parametrize("input_group", [128, None, "static"])
@pytest.mark.parametrize("shape", [(40, 384), (130, 1152), (16, 2048)])
@pytest.mark.parametrize(("is_grouped", "is_ue8m0"), [(False, False), (True, False), (True, True)])
def test_quantizing_linear_equals_quantize_then_scaled_linear(device, dtype, input_group, shape, is_grouped, is_ue8m0):
    """One row is quantized inside the product kernel, with the same bits."""
    outs, ins = shape
    static = torch.tensor(0.02, device=device) if input_group == "static" else None
    group, input_group = 128 if is_grouped else None, None if input_group == "static" else input_group
    input = (noise(1, ins, seed=1) * torch.logspace(-3, 2, ins)).to(device)
    input[0, 5], input[0, 200:204] = 0.0, 0.0
    weight = quantize_reference(noise(outs, ins, seed=2), dtype, None)[0].to(device)
    by, bias = (torch.arange(outs) // 24).int().to(device), noise(outs, seed=3).to(device)
    scales = noise(int(by[-1]) + 1, ins // 128 if is_grouped else 1, seed=4).abs().to(device) * 0.01
    codes, input_scales = quantize(input, dtype, input_group, static, is_ue8m0=is_ue8m0)
    expected = scaled_linear(codes, input_scales, weight, scales, by, torch.float32, group=group, tile=8, bias=bias)
    found = quantizing_linear(
        input, weight, scales, by, input_group=input_group, input_scale=static, is_ue8m0=is_ue8m0, group=group, tile=8,
        bias=bias,
    )  # fmt: skip
    assert torch.equal(found, expected)
    tensors = [tensor.cpu() for tensor in (codes, input_scales, weight, scales, by)]
    plain = scaled_linear_reference(*tensors, torch.float32, group=group, bias=bias.cpu())
    assert_near(found, plain, 1e-5 * float(plain.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [LIBRARY_ROWS - 1, LIBRARY_ROWS, 1001])
def test_scaled_linear_of_many_rows_matches_the_reference(rows):
    """In blocks of 128 x 128, which cuBLAS multiplies for at least LIBRARY_ROWS rows."""
    codes, scales = quantize_reference(noise(rows, 1024, seed=1), FP8[0], 128)
    weight, by = noise(384, 1024, seed=2).to(FP8[0]), (torch.arange(384) // 128).int()
    weight_scales = noise(3, 8, seed=3).abs() + 0.1
    expected = scaled_linear_reference(codes, scales, weight, weight_scales, by, torch.float32)
    tensors = [tensor.cuda() for tensor in (codes, scales, weight, weight_scales, by)]
    found = scaled_linear(*tensors, torch.bfloat16, tile=128).float().cpu()
    assert (found - expected).norm() < 0.005 * expected.norm()


@pytest.mark.skipif(not INTERPRETED, reason="tensors on a CPU are refused for their device there")
def test_matmul_refuses_invalid_arguments():
    x, scales = quantize(noise(2, 128, seed=0), torch.int8, None)
    rows = torch.zeros(2, dtype=torch.int32)
    for call in (
        lambda: invariant_linear(noise(2, 3, seed=0), noise(4, 5, seed=0)),
        lambda: invariant_linear(noise(2, 3, seed=0), noise(4, 3, seed=0).half()),
        lambda: invariant_linear(noise(2, 3, seed=0), noise(4, 3, seed=0), noise(3, seed=0)),
        lambda: quantize(noise(2, 64, seed=0), torch.int16, 32),
        lambda: quantize(noise(2, 60, seed=0), torch.int8, 32),
        lambda: quantize(noise(2, 64, seed=0), torch.int8, 24),
        lambda: quantize(noise(2, 64, seed=0), torch.int8, 32, torch.ones(())),
        lambda: quantizing_linear(noise(2, 128, seed=0), x, scales, rows, group=None),
        lambda: quantizing_linear(noise(1, 128, seed=0), x, scales, rows, group=None, input_group=64),
        lambda: quantizing_linear(noise(1, 128, seed=0), x, scales, rows, group=None, input_scale=torch.ones(())),
        lambda: scaled_linear(x, scales[:1], x, scales, rows, torch.float32, group=None),
        lambda: scaled_linear(x, scales, x, scales, rows, torch.float32, group=64),
        lambda: scaled_linear(x, scales, x, scales, rows.long(), torch.float32, group=None),
        lambda: scaled_linear(x, scales, x.float(), scales, rows, torch.float32, group=None),
        lambda: scaled_linear(x, scales.double(), x, scales, rows, torch.float32, group=None),
        lambda: scaled_linear(x, scales, x, scales, rows, torch.float32, group=None, bias=torch.ones(3)),
    ):
        with pytest.raises(UsageError):
            call()
