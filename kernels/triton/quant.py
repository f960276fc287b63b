"""Quantised matrix products: activations by groups of a token's features, weights by blocks.

    scale[i, g] = max(|input[i, g]|, 1e-10) / most               most: 448 of float8_e4m3fn, 57344 of e5m2, 127 of int8
    quantised = input / scale                                    rounded to nearest, ties to even
    output[i, o] = sum over g of (quantised[i, g] . weight[o, g]) * scale[i, g] * weight_scale[o // block, g]

which is how DeepSeek-V3 computes (arXiv:2412.19437, section 3.3: groups of 128 features, blocks of 128 x 128): products
of a group are summed in float32 (int8's in int32) before they are scaled. NaN stays NaN in FP8.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.launch import Launcher, check_same_device, check_stored, next_power

MOST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
"""The largest number of the types that are served."""
_LEAST = 1e-10


def quantize_groups_reference(input: Tensor, dtype: torch.dtype, group: int = 128) -> tuple[Tensor, Tensor]:
    """What :func:`quantize_groups` computes."""
    wide = input.float().view(len(input), input.shape[1] // group, group)
    scales = wide.abs().nan_to_num(0.0, torch.inf).amax(-1).clamp(min=_LEAST) / MOST[dtype]
    scaled = (wide / scales.unsqueeze(-1)).clamp(-MOST[dtype], MOST[dtype])
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype).flatten(1), scales


def quantize_groups(input: Tensor, dtype: torch.dtype, group: int = 128) -> tuple[Tensor, Tensor]:
    """[rows, n] -> (quantised [rows, n] of ``dtype``, scales [rows, n / group] float32), both contiguous.

    Rows may be apart. Raises UsageError for another type, and if n is not a multiple of ``group``, a power of two.
    """
    check_same_device(input)
    check_stored(dtype, input.device)
    if dtype not in MOST:
        raise UsageError(f"quantisation to {dtype}: one of {', '.join(map(str, MOST))} is needed")
    if input.ndim != 2 or group < 16 or group & (group - 1) or input.shape[1] % group or input.stride(1) != 1:
        raise UsageError(f"input {list(input.shape)}: contiguous rows of groups of {group}, a power of two, are needed")
    rows, columns = input.shape
    quantised = torch.empty(rows, columns, dtype=dtype, device=input.device)
    scales = torch.empty(rows, columns // group, dtype=torch.float32, device=input.device)
    if scales.numel():
        block = max(1, 1024 // group)
        constants = {"GROUP": group, "BLOCK": block, "MOST": MOST[dtype], "LEAST": _LEAST}
        grid = rows, -(-(columns // group) // block), 1
        args = input, quantised, scales, columns // group, input.stride(0)
        _launch_quantize(input.device, grid, args, constants, num_warps=4)
    return quantised, scales


def scaled_linear_reference(
    input: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """What :func:`scaled_linear` computes."""
    group = input.shape[1] // scales.shape[1]
    block = -(-len(weight) // len(weight_scales))
    by = weight_scales.repeat_interleave(block, 0)[: len(weight)]
    x, w = input.float() * scales.repeat_interleave(group, 1), weight.float() * by.repeat_interleave(group, 1)
    return (x @ w.T).to(dtype)


def scaled_linear(
    input: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype, *, block: int = 128
) -> Tensor:
    """[rows, ins] and [outs, ins] of one quantised type -> [rows, outs] of ``dtype``.

    ``scales`` [rows, groups] and ``weight_scales`` [outs / block, groups] float32 belong to groups of ins / groups
    features, a power of two of 16 or more; the last block of outputs may be shorter. A row's bits depend on that row
    alone. Raises UsageError for tensors that do not fit together.
    """
    _check(input, scales, weight, weight_scales, block)
    (rows, ins), outs = input.shape, len(weight)
    output = torch.empty(rows, outs, dtype=dtype, device=input.device)
    if not output.numel():
        return output
    args = input, scales, weight, weight_scales, output, rows, outs, scales.shape[1]
    columns = min(64, next_power(block))
    constants = {"GROUP": ins // scales.shape[1], "BLOCK_W": block, "BLOCK_M": 64, "BLOCK_N": max(16, columns)}
    grid = -(-outs // constants["BLOCK_N"]), -(-rows // 64), 1
    _launch_scaled(input.device, grid, args, constants, num_warps=4, num_stages=3)
    return output


def _check(input: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, block: int) -> None:
    """Raise UsageError for tensors that do not fit together."""
    check_same_device(input, scales, weight, weight_scales)
    check_stored(input.dtype, input.device)
    if input.dtype not in MOST or weight.dtype != input.dtype:
        raise UsageError(f"input is {input.dtype}, weight {weight.dtype}; one quantised type is needed")
    if input.ndim != 2 or weight.ndim != 2 or input.shape[1] != weight.shape[1]:
        raise UsageError(f"input {list(input.shape)} and weight {list(weight.shape)}: [rows, ins] and [outs, ins]")
    groups = scales.shape[-1]
    group = input.shape[1] // max(1, groups)
    if scales.shape != (len(input), groups) or group * groups != input.shape[1] or group < 16 or group & (group - 1):
        raise UsageError(
            f"scales {list(scales.shape)} of input {list(input.shape)}: groups of a power of two from 16 on"
        )
    if block < 1 or weight_scales.shape != (-(-len(weight) // block), groups):
        raise UsageError(f"weight_scales {list(weight_scales.shape)} of weight {list(weight.shape)}, block {block}")
    if {scales.dtype, weight_scales.dtype} != {torch.float32}:
        raise UsageError("scales are to be float32")
    if not all(tensor.is_contiguous() for tensor in (input, scales, weight, weight_scales)):
        raise UsageError("input, weight and scales are to be contiguous")


@triton.jit
def _quantize_kernel(
    input, quantised, scales, groups, input_row,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """BLOCK groups of one row."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    at, real = group * GROUP + tl.arange(0, GROUP)[None, :], group < groups
    x = tl.load(input + row * input_row + at, mask=real, other=0.0).to(tl.float32)
    most = tl.max(tl.where(x == x, tl.abs(x), 0.0), 1)[:, None]
    scale = tl.div_rn(tl.maximum(most, LEAST), tl.full(most.shape, MOST, tl.float32))
    x = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    x = tl.where(x > MOST, MOST, tl.where(x < -MOST, -MOST, x))
    if quantised.dtype.element_ty == tl.int8:
        x = (x + 12582912.0) - 12582912.0  # to the nearest integer, ties to even
    tl.store(quantised + row * groups * GROUP + at, x.to(quantised.dtype.element_ty), mask=real)
    tl.store(scales + row * groups + group, scale, mask=real)


@triton.jit(do_not_specialize=["rows"])
def _scaled_kernel(
    input, scales, weight, weight_scales, output, rows, outs, groups,
    GROUP: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of BLOCK_N outputs."""
    m, n = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, GROUP)[None, :]
    x_at = input + m.to(tl.int64)[:, None] * groups * GROUP + k
    w_at = weight + n.to(tl.int64)[:, None] * groups * GROUP + k
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in tl.range(0, groups):
        x = tl.load(x_at + group * GROUP, mask=(m < rows)[:, None], other=0.0)
        w = tl.load(w_at + group * GROUP, mask=(n < outs)[:, None], other=0.0)
        by = tl.load(scales + m * groups + group, mask=m < rows, other=0.0)
        weight_by = tl.load(weight_scales + n // BLOCK_W * groups + group, mask=n < outs, other=0.0)
        total += tl.dot(x, tl.trans(w)).to(tl.float32) * (by[:, None] * weight_by[None, :])
    at = output + m.to(tl.int64)[:, None] * outs + n[None, :]
    tl.store(at, total.to(output.dtype.element_ty), mask=(m < rows)[:, None] & (n < outs)[None, :])


_launch_quantize, _launch_scaled = Launcher(_quantize_kernel), Launcher(_scaled_kernel)
