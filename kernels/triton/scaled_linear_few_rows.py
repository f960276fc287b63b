"""The product of :mod:`.scaled_linear` for up to 16 rows in groups of 128 features, by a weight in groups."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tapscope.kernels.triton.launch import Launcher, next_power, num_sms, shared_memory
from tapscope.kernels.triton.quantize import GROUP

FEW_ROWS = 16
"""Rows at most."""
_LEAST_STAGES = 4


class FewLaunch(NamedTuple):
    """Launch configuration of the product with few input rows in groups of 128."""

    outputs: int
    """Rows of the weight of a program."""
    groups: int
    """Groups of 128 features of one iteration, each of a warp of its own."""
    most_stages: int
    """There are fewer where a multiprocessor could not run all its programs side by side, and 4 at the least."""


def few_launch(rows: int, outs: int, ins: int, device: torch.device) -> FewLaunch:
    """For up to 16 rows times a weight [outs, ins]; measured on the layers of Llama-8B (H200).

    ``groups`` decides in which order products are added, so one row has other bits than the same row among others.
    """
    if rows == 1 and outs > 48 * num_sms(device):
        return FewLaunch(32, 2, 4)  # programs of two warps, that all run side by side
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
    """:func:`scaled_linear` of up to 16 rows in groups of 128, by a weight in groups."""
    (count, ins), outs, device = input.shape, len(weight), input.device
    chosen = few_launch(count, outs, ins, device)
    groups, block = min(chosen.groups, next_power(-(-ins // GROUP))), 1 if count == 1 else max(8, next_power(count))
    programs = -(-outs // chosen.outputs)
    constants = {
        "W_GROUP": group or 0,
        "BLOCK_M": block,
        "BLOCK_N": chosen.outputs,
        "GROUPS": groups,
        "IS_UNIFORM": tile % chosen.outputs == 0,
        "IS_EVEN": ins % (groups * GROUP) == 0 and outs % chosen.outputs == 0,
        "IS_CONSTANT": is_constant,
    }
    numbers = count, ins, outs, input.stride(0), weight_scale.shape[1]
    args = input, input_scale, weight, weight_scale, rows, bias, output, *numbers
    free = (shared_memory(device) + 1024) // -(-programs // num_sms(device)) - 1024  # the driver takes 1 KiB of each
    held, buffered = (2, chosen.outputs) if count == 1 else (0, chosen.outputs + block)  # bytes by features
    buffers = (free // (groups * GROUP) - held) // buffered
    iterations = -(-ins // (groups * GROUP))
    stages = max(_LEAST_STAGES, 1 + min(chosen.most_stages - 1, buffers, iterations))
    _launch_scaled_few(device, (programs, 1, 1), args, constants, num_warps=groups, num_stages=stages)


@triton.jit(do_not_specialize=["rows"])
def _scaled_few_kernel(
    input, input_scale, weight, weight_scale, scale_row, bias, output, rows, ins, outs, input_row, w_groups,
    W_GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr,
    IS_UNIFORM: tl.constexpr, IS_EVEN: tl.constexpr, IS_CONSTANT: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of all rows. An iteration is a batch of GROUPS products, of which each warp computes its own.

    The compiler moves loads of a product's operands ahead of the iteration that uses them, those of the first
    iterations before the loop. One row is loaded by the iteration before instead, so that only the weight is loaded
    ahead of the wait for the previous kernel, which is in the loop. Of more rows that takes too many registers.
    """
    IS_ROW: tl.constexpr = BLOCK_M == 1
    if IS_OVERLAPPED:
        gdc_launch_dependents()
        if not (IS_ROW and IS_CONSTANT):
            gdc_wait()
    n, m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    g, k = tl.arange(0, GROUPS), tl.arange(0, 128)
    is_output, is_row, x_groups = n < outs, m < rows, ins // 128
    w_at = weight + n.to(tl.int64)[None, :, None] * ins + g[:, None, None] * 128 + k[None, None, :]
    x_at = input + m[None, None, :] * input_row + g[:, None, None] * 128 + k[None, :, None]
    x_by_at = input_scale + m[None, :] * x_groups + g[:, None]
    w_by_at = weight_scale + tl.zeros([GROUPS, 1 if IS_UNIFORM else BLOCK_N], tl.int32)
    total = tl.zeros([GROUPS, BLOCK_N, BLOCK_M], tl.float32)
    if IS_ROW:
        x = tl.zeros([GROUPS, 128, 1], input.dtype.element_ty)
    x_by = tl.zeros([GROUPS, BLOCK_M], tl.float32)
    w_by = tl.zeros([GROUPS, 1 if IS_UNIFORM else BLOCK_N], tl.float32)
    for first in tl.range(0, x_groups, GROUPS):
        here, later = (first + g < x_groups)[:, None], (first + GROUPS + g < x_groups)[:, None]
        if IS_EVEN:
            w = tl.load(w_at + first * 128)
        else:
            w = tl.load(w_at + first * 128, mask=is_output[None, :, None] & here[:, :, None], other=0.0)
        if first == 0:
            if IS_UNIFORM:
                w_by_at += tl.load(scale_row + tl.program_id(0) * BLOCK_N) * w_groups
            else:
                w_by_at += tl.load(scale_row + n, mask=is_output, other=0)[None, :] * w_groups
            w_by = tl.load(w_by_at + g[:, None] * 128 // W_GROUP, mask=here, other=0.0)
            if IS_OVERLAPPED and IS_ROW and IS_CONSTANT:
                gdc_wait()
            if IS_ROW:
                x = tl.load(x_at, mask=here[:, :, None], other=0.0)
            x_by = tl.load(x_by_at, mask=is_row[None, :] & here, other=0.0)
        start = first + GROUPS  # of the next iteration
        if IS_ROW:
            x_next = tl.load(x_at + start * 128, mask=later[:, :, None], other=0.0)
        else:
            x = tl.load(x_at + first * 128, mask=is_row[None, None, :] & here[:, :, None], other=0.0)
        x_by_next = tl.load(x_by_at + start, mask=is_row[None, :] & later, other=0.0)
        w_by_next = tl.load(w_by_at + (start + g[:, None]) * 128 // W_GROUP, mask=later, other=0.0)
        if weight.dtype.element_ty == tl.int8:
            part = tl.dot(w, x, out_dtype=tl.int32).to(tl.float32)
        else:
            part = tl.dot(w, x, input_precision="ieee")
        if IS_UNIFORM:
            total += part * (x_by * w_by)[:, None, :]
        else:
            total += part * x_by[:, None, :] * w_by[:, :, None]
        x_by, w_by = x_by_next, w_by_next
        if IS_ROW:
            x = x_next
    result = tl.sum(total, 0)
    if bias is not None:
        result += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
    at = output + m[None, :] * outs + n[:, None]
    tl.store(at, result.to(output.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])


_launch_scaled_few = Launcher(_scaled_few_kernel, overlaps=True)
