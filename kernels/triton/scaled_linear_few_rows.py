"""Product of :mod:`.scaled_linear` for up to 16 rows in groups of 128 features and a weight in groups."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tapscope.kernels.triton.launch import Launcher, next_power, num_sms, shared_memory
from tapscope.kernels.triton.quantize import GROUP

FEW_ROWS = 16
"""Maximum number of rows."""
_MIN_STAGES = 4


class FewLaunch(NamedTuple):
    """Launch configuration of the product with few input rows in groups of 128."""

    outputs: int
    """Rows of the weight per program (BLOCK_N)."""
    groups: int
    """Groups of 128 features per iteration, one per warp."""
    most_stages: int
    """Maximum pipeline stages; reduced, down to 4, until all programs of an SM are resident together."""


def few_launch(rows: int, outs: int, ins: int, device: torch.device) -> FewLaunch:
    """Return the launch for up to 16 rows and a weight [outs, ins]; measured on the layers of Llama-8B (H200).

    ``groups`` determines the summation order, so a single row may differ in its last bits from the same row in a batch.
    """
    if rows == 1 and outs > 48 * num_sms(device):
        return FewLaunch(32, 2, 4)  # programs of two warps, all resident together
    return FewLaunch(16, 8, 12) if rows == 1 and ins > 64 * GROUP else FewLaunch(16, 4, 6)


def launch_few_rows(
    input: Tensor,
    input_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    output: Tensor,
    group: int | None,
    tile: int,
    is_constant: bool,
) -> None:
    """Launch :func:`scaled_linear` for up to 16 rows in groups of 128 and a weight in groups, written to ``output``."""
    (count, ins), outs, device = input.shape, len(weight), input.device
    config = few_launch(count, outs, ins, device)
    groups, block = min(config.groups, next_power(-(-ins // GROUP))), 1 if count == 1 else max(8, next_power(count))
    programs = -(-outs // config.outputs)
    constants = {
        "W_GROUP": group or 0,
        "BLOCK_M": block,
        "BLOCK_N": config.outputs,
        "GROUPS": groups,
        "IS_UNIFORM": tile % config.outputs == 0,
        "IS_EVEN": ins % (groups * GROUP) == 0 and outs % config.outputs == 0,
        "IS_CONSTANT": is_constant,
    }
    numbers = count, ins, outs, input.stride(0), weight_scale.shape[1]
    args = input, input_scale, weight, weight_scale, rows, bias, output, *numbers
    free_bytes = (shared_memory(device) + 1024) // -(
        -programs // num_sms(device)
    ) - 1024  # the driver reserves 1 KiB per program
    reserved, per_stage = (2, config.outputs) if count == 1 else (0, config.outputs + block)  # bytes per feature
    buffers = (free_bytes // (groups * GROUP) - reserved) // per_stage
    iterations = -(-ins // (groups * GROUP))
    stages = max(_MIN_STAGES, 1 + min(config.most_stages - 1, buffers, iterations))
    _launch_scaled_few(device, (programs, 1, 1), args, constants, num_warps=groups, num_stages=stages)


@triton.jit(do_not_specialize=["rows"])
def _scaled_few_kernel(
    input, input_scale, weight, weight_scale, scale_row, bias, output, rows, ins, outs, input_row, w_groups,
    W_GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr,
    IS_UNIFORM: tl.constexpr, IS_EVEN: tl.constexpr, IS_CONSTANT: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of all rows; an iteration is a batch of GROUPS products, one per warp.

    The compiler pipelines the loads of a product's operands, and hoists those of the first iterations before the loop.
    A single row is therefore prefetched manually by the previous iteration. Only the weight is then loaded before the
    wait for the previous kernel (PDL), which is inside of the loop. For more rows this would take too many registers.
    """
    IS_ROW: tl.constexpr = BLOCK_M == 1
    if IS_OVERLAPPED:
        gdc_launch_dependents()
        if not (IS_ROW and IS_CONSTANT):
            gdc_wait()
    n, m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    g, k = tl.arange(0, GROUPS), tl.arange(0, 128)
    is_output, is_row, x_groups = n < outs, m < rows, ins // 128
    w_ptrs = weight + n.to(tl.int64)[None, :, None] * ins + g[:, None, None] * 128 + k[None, None, :]
    x_ptrs = input + m[None, None, :] * input_row + g[:, None, None] * 128 + k[None, :, None]
    x_scale_ptrs = input_scale + m[None, :] * x_groups + g[:, None]
    w_scale_ptrs = weight_scale + tl.zeros([GROUPS, 1 if IS_UNIFORM else BLOCK_N], tl.int32)
    acc = tl.zeros([GROUPS, BLOCK_N, BLOCK_M], tl.float32)
    if IS_ROW:
        x = tl.zeros([GROUPS, 128, 1], input.dtype.element_ty)
    x_scale = tl.zeros([GROUPS, BLOCK_M], tl.float32)
    w_scale = tl.zeros([GROUPS, 1 if IS_UNIFORM else BLOCK_N], tl.float32)
    for first in tl.range(0, x_groups, GROUPS):
        valid, valid_next = (first + g < x_groups)[:, None], (first + GROUPS + g < x_groups)[:, None]
        if IS_EVEN:
            w = tl.load(w_ptrs + first * 128)
        else:
            w = tl.load(w_ptrs + first * 128, mask=is_output[None, :, None] & valid[:, :, None], other=0.0)
        if first == 0:
            if IS_UNIFORM:
                w_scale_ptrs += tl.load(scale_row + tl.program_id(0) * BLOCK_N) * w_groups
            else:
                w_scale_ptrs += tl.load(scale_row + n, mask=is_output, other=0)[None, :] * w_groups
            w_scale = tl.load(w_scale_ptrs + g[:, None] * 128 // W_GROUP, mask=valid, other=0.0)
            if IS_OVERLAPPED and IS_ROW and IS_CONSTANT:
                gdc_wait()
            if IS_ROW:
                x = tl.load(x_ptrs, mask=valid[:, :, None], other=0.0)
            x_scale = tl.load(x_scale_ptrs, mask=is_row[None, :] & valid, other=0.0)
        start = first + GROUPS  # start of the next iteration
        if IS_ROW:
            x_next = tl.load(x_ptrs + start * 128, mask=valid_next[:, :, None], other=0.0)
        else:
            x = tl.load(x_ptrs + first * 128, mask=is_row[None, None, :] & valid[:, :, None], other=0.0)
        x_scale_next = tl.load(x_scale_ptrs + start, mask=is_row[None, :] & valid_next, other=0.0)
        w_scale_next = tl.load(w_scale_ptrs + (start + g[:, None]) * 128 // W_GROUP, mask=valid_next, other=0.0)
        if weight.dtype.element_ty == tl.int8:
            product = tl.dot(w, x, out_dtype=tl.int32).to(tl.float32)
        else:
            product = tl.dot(w, x, input_precision="ieee")
        if IS_UNIFORM:
            acc += product * (x_scale * w_scale)[:, None, :]
        else:
            acc += product * x_scale[:, None, :] * w_scale[:, :, None]
        x_scale, w_scale = x_scale_next, w_scale_next
        if IS_ROW:
            x = x_next
    result = tl.sum(acc, 0)
    if bias is not None:
        result += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
    out_ptrs = output + m[None, :] * outs + n[:, None]
    tl.store(out_ptrs, result.to(output.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])


_launch_scaled_few = Launcher(_scaled_few_kernel, overlaps=True)
