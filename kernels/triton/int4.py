"""Grouped matrix products with 4-bit expert weights: integers with scales and zero points, or MXFP4.

    output[i, o] = sum over k of input[i, k] * weight[e, o, k]              row i belongs to expert e
    weight[e, o, k] = (code - zero) * scale    or    e2m1(code) * 2^(scale - 127)      of the group of feature k

The even feature of a byte is in its low nibble. Weights are rounded to the input's dtype, as if the matrix had been
dequantized. Even and odd features are separate products, so no interleaving is needed. Sums are in float32. MXFP4: OCP
Microscaling Formats 1.0, section 5.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.launch import Launcher, check_same_device, next_power

_FLOATS = torch.float32, torch.float16, torch.bfloat16
_ROWS, _OUTPUTS = 64, 32
_SIZES = 32, 64, 128, 256


def grouped_int4_linear_reference(
    input: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, rows: Tensor | None, ends: Tensor
) -> Tensor:
    """Compute :func:`grouped_int4_linear` in plain PyTorch, expert by expert; rows without an expert are zero."""
    output, start = input.new_zeros(len(input), codes.shape[1]), 0
    size = 2 * codes.shape[2] // scales.shape[2]
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    for expert, end in enumerate(ends.tolist()):
        unpacked = torch.stack((codes[expert] & 15, codes[expert] >> 4), -1).flatten(1).long()
        expert_scales = scales[expert] if rows is None else scales[expert][rows]
        if scales.dtype == torch.uint8:
            matrix = torch.cat((positive, -positive))[unpacked] * torch.exp2(
                expert_scales.float() - 127
            ).repeat_interleave(size, 1)
        else:
            zero_points = 8.0 if zeros is None else zeros[expert][rows].float().repeat_interleave(size, 1)
            matrix = (unpacked.float() - zero_points) * expert_scales.float().repeat_interleave(size, 1)
        output[start:end] = (input[start:end].float() @ matrix.to(input.dtype).float().T).to(input.dtype)
        start = end
    return output


def grouped_int4_linear(
    input: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, rows: Tensor | None, ends: Tensor, most: int
) -> Tensor:
    """Return the grouped product [rows, outs]: rows [ends[e-1], ends[e]) of ``input`` times the weight of expert e.

    ``input`` is [rows, ins], ``codes`` [experts, outs, ins / 2] uint8. For integer weights, ``scales`` are floats
    [experts, scale rows, groups], ``zeros`` are uint8 zero points of the same shape (None means 8), and ``rows`` [outs]
    int32 maps outputs to scale rows. For MXFP4, ``scales`` are uint8 exponents [experts, outs, groups], and ``zeros``
    and ``rows`` are None. A group has 32, 64, 128 or 256 features. ``ends`` [experts] int32 is read on the device. No
    expert may have more than ``most`` rows; output rows from ends[-1] on are undefined. Raises UsageError for
    inconsistent tensors.
    """
    check_same_device(input, codes, scales, zeros, rows, ends)
    if input.ndim != 2 or codes.ndim != 3 or scales.ndim != 3 or input.shape[1] != 2 * codes.shape[2]:
        shapes = f"input {list(input.shape)}, codes {list(codes.shape)}, scales {list(scales.shape)}"
        raise UsageError(f"{shapes}: [rows, ins], [experts, outs, ins / 2] and [experts, scale rows, groups]")
    (experts, outs, half), (_, scale_rows, groups) = codes.shape, scales.shape
    is_float = scales.dtype == torch.uint8
    has_rows = scale_rows == outs if rows is None else rows.shape == (outs,)
    if is_float != (rows is None) or not has_rows or not ends.shape == (experts,) == scales.shape[:1]:
        raise UsageError(f"codes {list(codes.shape)}, scales {list(scales.shape)}, ends {list(ends.shape)} do not fit")
    if (reason := why_not_int4(2 * half, groups)) is not None:
        raise UsageError(reason)
    if zeros is not None and (is_float or zeros.shape != scales.shape):
        raise UsageError(f"zeros {list(zeros.shape)}: expected one per scale, and none for MXFP4")
    if input.dtype not in _FLOATS or {t.dtype for t in (codes, zeros) if t is not None} != {torch.uint8}:
        raise UsageError(f"input is {input.dtype} and codes {codes.dtype}; expected floats and uint8")
    whole = [t for t in (codes, scales, zeros, rows, ends) if t is not None]
    if any(t is not None and t.dtype != torch.int32 for t in (rows, ends)) or input.stride(1) != 1:
        raise UsageError("rows and ends must be int32, and rows of the input contiguous")
    if not all(tensor.is_contiguous() for tensor in whole):
        raise UsageError("codes, scales, zeros, rows and ends must be contiguous")
    output = input.new_empty(len(input), outs)
    if output.numel() and most > 0:
        block = min(_ROWS, max(16, next_power(min(most, -(-len(input) // experts)))))
        grid = -(-outs // _OUTPUTS), -(-most // block), experts
        args = input, codes, scales, zeros, rows, ends, output, outs, half, input.stride(0), scale_rows, groups
        constants = {"BLOCK_M": block, "BLOCK_N": _OUTPUTS, "HALF": half // groups, "IS_FLOAT": is_float}
        _launch(input.device, grid, args, constants, num_warps=4, num_stages=3)
    return output


def why_not_int4(ins: int, groups: int) -> str | None:
    """Return why the kernel does not support ``ins`` features in ``groups`` groups, as a sentence, or None."""
    size = ins // groups if groups and ins % groups == 0 else 0
    if size in _SIZES:
        return None
    return f"{ins} features in {groups} groups: groups of {', '.join(map(str, _SIZES))} features are supported"


@triton.jit
def _e2m1(code):
    """Decode 4-bit e2m1 floats: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    exponent, is_odd = (code >> 1) & 3, (code & 1).to(tl.float32)
    normal = (1.0 + 0.5 * is_odd) * tl.where(exponent == 3, 4.0, tl.where(exponent == 2, 2.0, 1.0))
    magnitude = tl.where(exponent == 0, 0.5 * is_odd, normal)
    return tl.where(code >= 8, -magnitude, magnitude)


@triton.jit
def _grouped_int4_kernel(
    input, codes, scales, zeros, scale_row, ends, output, outs, half, input_row, scale_rows, groups,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HALF: tl.constexpr, IS_FLOAT: tl.constexpr,
):  # fmt: skip
    """Compute a tile [BLOCK_N outputs, BLOCK_M rows] of one expert, one group of 2 * HALF features per iteration."""
    expert = tl.program_id(2).to(tl.int64)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    m = first + tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    end = tl.load(ends + expert)
    if first + tl.program_id(1) * BLOCK_M >= end:
        return
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, HALF)
    is_row, is_output = m < end, n < outs
    scale_index = n
    if scale_row is not None:
        scale_index = tl.load(scale_row + n, mask=is_output, other=0)
    scale_offset = (expert * scale_rows + scale_index) * groups
    code_ptrs = codes + (expert * outs + n)[:, None] * half + k[None, :]
    x_ptrs = input + m.to(tl.int64)[None, :] * input_row + 2 * k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for group in tl.range(0, groups):
        packed = tl.load(code_ptrs + group * HALF, mask=is_output[:, None], other=0).to(tl.int32)
        scale = tl.load(scales + scale_offset + group, mask=is_output, other=0)
        if IS_FLOAT:
            factor = tl.exp2(scale.to(tl.float32) - 127.0)[:, None]
            low, high = _e2m1(packed & 15), _e2m1(packed >> 4)
        else:
            factor = scale.to(tl.float32)[:, None]
            zero = tl.full([BLOCK_N], 8.0, tl.float32)
            if zeros is not None:
                zero = tl.load(zeros + scale_offset + group, mask=is_output, other=0).to(tl.float32)
            low, high = (packed & 15).to(tl.float32) - zero[:, None], (packed >> 4).to(tl.float32) - zero[:, None]
        even = tl.load(x_ptrs + group * 2 * HALF, mask=is_row[None, :], other=0.0)
        odd = tl.load(x_ptrs + group * 2 * HALF + 1, mask=is_row[None, :], other=0.0)
        acc = tl.dot((low * factor).to(even.dtype), even, acc, input_precision="ieee")
        acc = tl.dot((high * factor).to(even.dtype), odd, acc, input_precision="ieee")
    out_ptrs = output + m.to(tl.int64)[None, :] * outs + n[:, None]
    tl.store(out_ptrs, acc.to(output.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])


_launch = Launcher(_grouped_int4_kernel)
