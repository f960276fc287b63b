"""Quantization of activations, per group of features or per row.

    scale[i, g] = max(|input[i, g]|, 1e-10) / most               most: 448 of float8_e4m3fn, 57344 of e5m2, 127 of int8
                                                                 UE8M0: rounded up to a power of two
    codes[i, g] = input[i, g] / scale[i, g]                      rounded to nearest, ties to even

A group g is 128 features, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3), or a whole row (arXiv:2211.10438: int8 per
token). NaN stays NaN in FP8. The reference implementations are in kernels/quantization.py, for use without Triton.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.kernels.quantization import LEAST, MOST, next_powers_of_two
from tapscope.kernels.triton.launch import Launcher, check_same_device, check_stored, next_power, wait_for_previous

GROUP = 128
"""Features of input and weight that share a scale, unless a row has a single scale."""


class Quantized(NamedTuple):
    """Buffers for the quantized form of a kernel's output [rows, n], written in addition to the output."""

    codes: Tensor
    """[rows, n], contiguous."""
    scales: Tensor
    """[rows, n / 128] float32, contiguous."""
    is_ue8m0: bool
    """Whether scales are rounded up to powers of two."""

    @classmethod
    def empty(cls, rows: int, columns: int, dtype: torch.dtype, device: torch.device, is_ue8m0: bool) -> "Quantized":
        """Allocate buffers for an output [rows, columns]; ``columns`` must be a multiple of 128."""
        codes = torch.empty(rows, columns, dtype=dtype, device=device)
        return cls(codes, torch.empty(rows, columns // GROUP, dtype=torch.float32, device=device), is_ue8m0)

    def check(self, rows: int, columns: int) -> None:
        """Raise UsageError unless shapes, dtypes and device suit an output [rows, columns]."""
        codes, scales = self.codes, self.scales
        if codes.shape != (rows, columns) or columns % GROUP or scales.shape != (rows, columns // GROUP):
            raise UsageError(
                f"codes are {list(codes.shape)}, scales {list(scales.shape)}; expected [{rows}, {columns}] and "
                f"[{rows}, {columns} / {GROUP}], for a multiple of {GROUP} columns"
            )
        if not (codes.dtype in MOST and scales.dtype == torch.float32):
            raise UsageError(f"codes are {codes.dtype}, scales {scales.dtype}; expected a quantized dtype and float32")
        check_stored(codes.dtype, codes.device)

    @staticmethod
    def constants(quantized: "Quantized | None") -> dict[str, float | bool]:
        """Return the constexpr arguments of a kernel that calls :func:`store_quantized`, also for None."""
        most = 0.0 if quantized is None else MOST[quantized.codes.dtype]
        return {"MOST": most, "LEAST": LEAST, "IS_UE8M0": quantized is not None and quantized.is_ue8m0}


def quantize(
    input: Tensor,
    dtype: torch.dtype,
    group: int | None = GROUP,
    scale: Tensor | None = None,
    *,
    is_ue8m0: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantize ``input`` [rows, n]; return (codes [rows, n] of ``dtype``, scales [rows, groups] float32), contiguous.

    ``group`` features share a scale, a power of two (at least 16) that divides n; None means one scale per row. With
    ``scale``, a float32 scalar on the device, rows are divided by it instead (static quantization; ``group`` must be
    None). With ``is_ue8m0``, scales are rounded up to powers of two. Rows of the input may have any stride. Raises
    UsageError for unsupported dtypes and shapes.
    """
    check_same_device(input, scale)
    check_stored(dtype, input.device)
    if dtype not in MOST:
        raise UsageError(f"cannot quantize to {dtype}; supported: {', '.join(map(str, MOST))}")
    if input.ndim != 2 or input.stride(1) != 1 or (scale is not None and group is not None):
        raise UsageError(f"input {list(input.shape)}: expected [rows, n] with contiguous rows")
    if group is not None and (group < 16 or group & (group - 1) or input.shape[1] % group):
        raise UsageError(f"input {list(input.shape)}: expected groups of a power of two from 16, not {group}")
    rows, columns = input.shape
    codes = torch.empty(rows, columns, dtype=dtype, device=input.device)
    groups = 1 if group is None else columns // group
    scales = torch.empty(rows, groups, dtype=torch.float32, device=input.device)
    if not codes.numel():
        scales.fill_(LEAST / MOST[dtype])
        return codes, next_powers_of_two(scales) if is_ue8m0 else scales
    constants = {"MOST": MOST[dtype], "LEAST": LEAST, "IS_UE8M0": is_ue8m0}
    if group is None:
        args = input, codes, scales, scale, columns, input.stride(0)
        constants |= {"BLOCK": min(4096, max(16, next_power(columns)))}
        _launch_quantize_rows(input.device, (rows, 1, 1), args, constants, num_warps=4)
        return codes, scales
    _quantize_groups(input, codes, scales, group, constants)
    return codes, scales


def quantize_into(input: Tensor, quantized: Quantized) -> None:
    """Quantize ``input`` [rows, n] in groups of 128 into ``quantized``; raise UsageError for another shape."""
    quantized.check(*input.shape)
    if input.numel():
        _quantize_groups(input, quantized.codes, quantized.scales, GROUP, Quantized.constants(quantized))


def _quantize_groups(
    input: Tensor, codes: Tensor, scales: Tensor, group: int, constants: Mapping[str, float | bool]
) -> None:
    """Launch the group-wise kernel."""
    (rows, groups), block = scales.shape, max(1, 1024 // group)
    grid = rows, -(-groups // block), 1
    args = input, codes, scales, groups, input.stride(0)
    _launch_quantize(input.device, grid, args, {"GROUP": group, "BLOCK": block, **constants}, num_warps=4)


@triton.jit
def codes_of(x, MOST: tl.constexpr, dtype: tl.constexpr):
    """Convert scaled values to codes of ``dtype``, saturated; int8 rounds to nearest even and maps NaN to 0."""
    x = tl.where(x > MOST, MOST, tl.where(x < -MOST, -MOST, x))
    if dtype == tl.int8:
        x = tl.where(x == x, (x + 12582912.0) - 12582912.0, 0.0)  # to the nearest integer, ties to even
    return x.to(dtype)


@triton.jit
def scale_of(max_abs, MOST: tl.constexpr, LEAST: tl.constexpr, IS_UE8M0: tl.constexpr):
    """Return the scale of a group with the largest absolute value ``max_abs``."""
    scale = tl.div_rn(tl.maximum(max_abs, LEAST), tl.full(max_abs.shape, MOST, tl.float32))
    if IS_UE8M0:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def store_quantized(
    x, codes, scales, valid, MOST: tl.constexpr, LEAST: tl.constexpr, IS_UE8M0: tl.constexpr,
):  # fmt: skip
    """Quantize and store float32 values [groups, features].

    ``codes`` are pointers of that shape, ``scales`` pointers [groups, 1]; ``valid`` masks the stores.
    """
    max_abs = tl.max(tl.where(x == x, tl.abs(x), 0.0), 1)[:, None]
    scale = scale_of(max_abs, MOST, LEAST, IS_UE8M0)
    x = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    tl.store(codes, codes_of(x, MOST, codes.dtype.element_ty), mask=valid)
    tl.store(scales, scale, mask=valid)


@triton.jit
def _quantize_kernel(
    input, codes, scales, groups, input_row,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr, IS_UE8M0: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Quantize BLOCK groups of one row."""
    wait_for_previous(IS_OVERLAPPED)
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column, valid = group * GROUP + tl.arange(0, GROUP)[None, :], group < groups
    x = tl.load(input + row * input_row + column, mask=valid, other=0.0).to(tl.float32)
    store_quantized(
        x, codes + row * groups * GROUP + column, scales + row * groups + group, valid, MOST, LEAST, IS_UE8M0
    )


@triton.jit
def _quantize_rows_kernel(
    input, codes, scales, fixed, columns, input_row,
    BLOCK: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr, IS_UE8M0: tl.constexpr,
):  # fmt: skip
    """Quantize one row with the scale ``fixed``, or with the scale of its largest absolute value."""
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if fixed is not None:
        scale = tl.load(fixed)
    else:
        max_abs = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, columns, BLOCK):
            x = tl.load(input + row * input_row + start + k, mask=start + k < columns, other=0.0).to(tl.float32)
            max_abs = tl.maximum(max_abs, tl.where(x == x, tl.abs(x), 0.0))
        scale = scale_of(tl.max(max_abs, 0), MOST, LEAST, IS_UE8M0)
    for start in tl.range(0, columns, BLOCK):
        x = tl.load(input + row * input_row + start + k, mask=start + k < columns, other=0.0).to(tl.float32)
        x = tl.div_rn(x, tl.full([BLOCK], 1.0, tl.float32) * scale)
        tl.store(codes + row * columns + start + k, codes_of(x, MOST, codes.dtype.element_ty), mask=start + k < columns)
    tl.store(scales + row, scale)


_launch_quantize, _launch_quantize_rows = Launcher(_quantize_kernel, overlaps=True), Launcher(_quantize_rows_kernel)
