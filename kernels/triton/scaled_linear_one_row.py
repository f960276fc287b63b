"""Single-row product of :mod:`.scaled_linear`, optionally fused with the quantization of the row.

The product is computed in float32 without tensor cores.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tapscope.kernels.quantization import LEAST, MOST
from tapscope.kernels.triton.launch import Launcher, next_power, wait_for_previous
from tapscope.kernels.triton.quantize import GROUP, codes_of, scale_of


class RowLaunch(NamedTuple):
    """Launch configuration of the product with one input row."""

    outputs: int
    """Rows of the weight per program (BLOCK_N)."""
    groups: int
    """Groups of 128 features per iteration."""
    warps: int
    stages: int


ROW_LAUNCH = RowLaunch(8, 8, 4, 1)
"""Measured on the layers of Llama-8B (H100)."""


def launch_one_row(
    input: Tensor,
    input_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    output: Tensor,
    group: int | None,
    tile: int,
    x_group: int,
    quantizes: bool,
    is_ue8m0: bool = False,
    chosen: RowLaunch = ROW_LAUNCH,
) -> None:
    """Launch the single-row product of :func:`scaled_linear` or :func:`quantizing_linear`, written to ``output``.

    ``x_group`` is 128 for an input with group scales, else 0. With ``quantizes``, the kernel quantizes the input.
    """
    outs, ins = weight.shape
    groups = min(chosen.groups, next_power(-(-ins // GROUP)))
    constants = {
        "MOST": MOST[weight.dtype],
        "LEAST": LEAST,
        "IS_UE8M0": is_ue8m0,
        "X_GROUP": x_group,
        "W_GROUP": group or 0,
        "BLOCK_N": chosen.outputs,
        "GROUPS": groups,
        "QUANTIZES": quantizes,
        "IS_UNIFORM": tile % chosen.outputs == 0,
        "IS_EVEN": ins % (groups * GROUP) == 0 and outs % chosen.outputs == 0,
        "STAGES": chosen.stages,
    }
    args = input, input_scale, weight, weight_scale, rows, bias, output, ins, outs, weight_scale.shape[1]
    grid = -(-outs // chosen.outputs), 1, 1
    _launch_scaled_row(input.device, grid, args, constants, num_warps=chosen.warps, num_stages=chosen.stages)


@triton.jit
def _load_row_block(
    input, scales, index, valid, group, scale, ins,
    MOST: tl.constexpr, X_GROUP: tl.constexpr, QUANTIZES: tl.constexpr, IS_EVEN: tl.constexpr, dtype: tl.constexpr,
    LEAST: tl.constexpr, IS_UE8M0: tl.constexpr,
):  # fmt: skip
    """Load [groups, 128] codes or values of the row as float32, multiplied by their group scales (with X_GROUP).

    With QUANTIZES, values are quantized first; ``scale`` is the scale of the whole row without X_GROUP.
    """
    if IS_EVEN:
        x = tl.load(input + index).to(tl.float32)
    else:
        x = tl.load(input + index, mask=valid, other=0.0).to(tl.float32)
    if QUANTIZES:
        if X_GROUP:
            max_abs = tl.max(tl.where(x == x, tl.abs(x), 0.0), 1)
            group_scale = scale_of(max_abs, MOST, LEAST, IS_UE8M0)
            codes = codes_of(tl.div_rn(x, tl.broadcast_to(group_scale[:, None], x.shape)), MOST, dtype)
            return codes.to(tl.float32) * group_scale[:, None]
        else:
            return codes_of(tl.div_rn(x, tl.full(x.shape, 1.0, tl.float32) * scale), MOST, dtype).to(tl.float32)
    else:
        if X_GROUP:
            x = x * tl.load(scales + group, mask=group * 128 < ins, other=0.0)[:, None]
        return x


@triton.jit
def _scaled_row_kernel(
    input, input_scale, weight, weight_scale, scale_row, bias, output, ins, outs, w_groups,
    MOST: tl.constexpr, LEAST: tl.constexpr, IS_UE8M0: tl.constexpr,
    X_GROUP: tl.constexpr, W_GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr, QUANTIZES: tl.constexpr, IS_UNIFORM: tl.constexpr, IS_EVEN: tl.constexpr,
    STAGES: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of one row, which is quantized in the kernel with QUANTIZES."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output, group = n < outs, tl.arange(0, GROUPS)
    k = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    w_ptrs = weight + n.to(tl.int64)[:, None, None] * ins + k[None, :, :]
    wait_for_previous(IS_OVERLAPPED)
    scale_index = tl.load(scale_row + n, mask=is_output, other=0)
    if IS_UNIFORM:
        scale_index = tl.load(scale_row + tl.program_id(0) * BLOCK_N)
    x_scale = 1.0
    if QUANTIZES and X_GROUP == 0:
        if input_scale is not None:
            x_scale = tl.load(input_scale)
        else:
            max_abs = tl.zeros([GROUPS, 128], tl.float32)
            for start in tl.range(0, ins, GROUPS * 128):
                x = tl.load(input + start + k, mask=start + k < ins, other=0.0).to(tl.float32)
                max_abs = tl.maximum(max_abs, tl.where(x == x, tl.abs(x), 0.0))
            x_scale = scale_of(tl.max(tl.max(max_abs, 1), 0), MOST, LEAST, IS_UE8M0)
    acc = tl.zeros([BLOCK_N, GROUPS, 128], tl.float32)
    for start in tl.range(0, ins, GROUPS * 128, num_stages=STAGES):
        valid = start + k < ins
        if IS_EVEN:
            w = tl.load(w_ptrs + start)
        else:
            w = tl.load(w_ptrs + start, mask=is_output[:, None, None] & valid[None, :, :], other=0.0)
        x = _load_row_block(
            input, input_scale, start + k, valid, start // 128 + group, x_scale, ins,
            MOST, X_GROUP, QUANTIZES, IS_EVEN, weight.dtype.element_ty, LEAST, IS_UE8M0,
        )  # fmt: skip
        w_float = w.to(tl.float32)
        if W_GROUP:
            scale_group = (start + group * 128) // W_GROUP
            if IS_UNIFORM:
                group_scale = tl.load(
                    weight_scale + scale_index * w_groups + scale_group, mask=scale_group < w_groups, other=0.0
                )
                x = x * group_scale[:, None]
            else:
                scale_ptrs = weight_scale + scale_index[:, None] * w_groups + scale_group[None, :]
                group_scale = tl.load(
                    scale_ptrs, mask=is_output[:, None] & (scale_group < w_groups)[None, :], other=0.0
                )
                w_float = w_float * group_scale[:, :, None]
        acc += w_float * x[None, :, :]
    result = tl.sum(tl.sum(acc, 2), 1)
    if W_GROUP == 0:
        if IS_UNIFORM:
            result = result * tl.load(weight_scale + scale_index)
        else:
            result = result * tl.load(weight_scale + scale_index, mask=is_output, other=0.0)
    if X_GROUP == 0:
        if QUANTIZES:
            result = result * x_scale
        elif input_scale is not None:
            result = result * tl.load(input_scale)
    if bias is not None:
        result += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)
    tl.store(output + n, result.to(output.dtype.element_ty), mask=is_output)


_launch_scaled_row = Launcher(_scaled_row_kernel, overlaps=True)
