"""Batch-invariant linear layers: each output row depends on its own input row alone, bit for bit.

    output[i] = input[i] . weight^T + bias          sums in float32, bias added before the result is rounded

GEMM libraries choose tile sizes and split-K by the number of rows, so a row's last bits change with the batch. Here
both depend on the weight's shape alone (He et al., "Defeating Nondeterminism in LLM Inference", 2025): every program
computes a tile of rows and outputs and accumulates over k in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.launch import Launcher, check_same_device

_ROWS, _INPUTS = 64, 64


def invariant_linear_reference(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`invariant_linear` in plain PyTorch, up to summation order."""
    wide = functional.linear(input.float(), weight.float(), None if bias is None else bias.float())
    return wide.to(input.dtype)


def invariant_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``input @ weight.T + bias``, batch-invariant: [rows, outs] in the input's dtype.

    ``input`` is [rows, ins], ``weight`` [outs, ins], ``bias`` [outs]. Input and weight may have any strides. Raises
    UsageError for inconsistent tensors.
    """
    check_same_device(input, weight, bias)
    if input.ndim != 2 or weight.ndim != 2 or input.shape[1] != weight.shape[1]:
        raise UsageError(f"input {list(input.shape)} and weight {list(weight.shape)}: [rows, ins] and [outs, ins]")
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        raise UsageError(f"bias {list(bias.shape)}: expected contiguous, one per output ({len(weight)})")
    if any(each is not None and each.dtype != input.dtype for each in (weight, bias)):
        raise UsageError(f"input, weight and bias must have one dtype; the input is {input.dtype}")
    output = input.new_empty(len(input), len(weight))
    if output.numel():
        _launch_linear(input, weight, bias, output, None)
    return output


def grouped_invariant_linear(input: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return the grouped product [rows, outs]: rows [ends[e-1], ends[e]) of ``input`` times ``weight[e].T``.

    ``input`` is [rows, ins] and ``weight`` [experts, outs, ins]. Rows equal those of :func:`invariant_linear`.
    ``ends`` [experts] int32 is read on the device; output rows from ends[-1] on are undefined. Raises UsageError for
    inconsistent tensors.
    """
    check_same_device(input, weight, ends)
    if input.ndim != 2 or weight.ndim != 3 or input.shape[1] != weight.shape[2] or ends.shape != weight.shape[:1]:
        shapes = f"input {list(input.shape)}, weight {list(weight.shape)} and ends {list(ends.shape)}"
        raise UsageError(f"{shapes}: [rows, ins], [experts, outs, ins] and [experts]")
    if weight.dtype != input.dtype or ends.dtype != torch.int32 or not ends.is_contiguous():
        raise UsageError(f"input is {input.dtype}, weight {weight.dtype}, ends {ends.dtype}; one dtype, and int32")
    output = input.new_empty(len(input), weight.shape[1])
    if output.numel() and len(ends):
        _launch_linear(input, weight, None, output, ends)
    return output


def _launch_linear(input: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, ends: Tensor | None) -> None:
    (rows, ins), outs = input.shape, output.shape[1]
    columns = (
        128 if outs >= 16384 else 64 if outs >= 4096 else 32
    )  # narrow tiles, so that few rows still fill the device
    grid = -(-outs // columns), -(-rows // _ROWS), 1 if ends is None else len(ends)
    strides = *input.stride(), *weight.stride()[-2:], 0 if ends is None else weight.stride(0)
    args = input, weight, bias, output, ends, rows, outs, ins, *strides
    constants = {"BLOCK_M": _ROWS, "BLOCK_N": columns, "BLOCK_K": _INPUTS if input.element_size() < 4 else 32}
    _launch(input.device, grid, args, constants, num_warps=4, num_stages=4, enable_fp_fusion=False)


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    input, weight, bias, output, ends, rows, outs, ins, input_row, input_column, weight_row, weight_column, expert_step,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of BLOCK_M rows and BLOCK_N outputs; with ``ends``, of the rows of one expert."""
    if ends is not None:
        expert = tl.program_id(2).to(tl.int64)
        first = tl.load(ends + expert - 1, mask=expert > 0, other=0).to(tl.int64)
        rows = tl.load(ends + expert) - first.to(tl.int32)
        if tl.program_id(1) * BLOCK_M >= rows:
            return
        input += first * input_row
        output += first * outs
        weight += expert * expert_step
    m, n = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = input + m.to(tl.int64)[:, None] * input_row + k[None, :] * input_column
    w_ptrs = weight + n.to(tl.int64)[:, None] * weight_row + k[None, :] * weight_column
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, ins, BLOCK_K):
        k_mask = (start + k < ins)[None, :]
        x = tl.load(x_ptrs, mask=(m < rows)[:, None] & k_mask, other=0.0)
        w = tl.load(w_ptrs, mask=(n < outs)[:, None] & k_mask, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        x_ptrs += BLOCK_K * input_column
        w_ptrs += BLOCK_K * weight_column
    if bias is not None:
        acc += tl.load(bias + n, mask=n < outs, other=0.0).to(tl.float32)[None, :]
    out_ptrs = output + m.to(tl.int64)[:, None] * outs + n[None, :]
    tl.store(out_ptrs, acc.to(output.dtype.element_ty), mask=(m < rows)[:, None] & (n < outs)[None, :])


_launch = Launcher(_linear_kernel)
