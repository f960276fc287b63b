"""Linear layer for few rows (decoding): output[m, n] = sum_k input[m, k] * weight[n, k] + bias[n].

With few rows the product is bound by reading the weight once. Each program processes BLOCK_N rows of the weight and all
rows of the input, which stay in cache. There is no split-K, so one kernel suffices and the summation order is fixed.
Sums are accumulated in float32 and rounded once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.launch import Launcher, check_same_device, next_power, wait_for_previous

MOST_ROWS = 16
"""Maximum number of rows; beyond it cuBLAS is faster."""
MOST_BYTES = 48 << 20
"""Maximum size of a weight in bytes; larger weights are read as fast by cuBLAS."""


class LinearLaunch(NamedTuple):
    """Launch configuration of the kernel for a number of rows."""

    outputs: int
    """Rows of the weight per program (BLOCK_N)."""
    block: int
    """Features per iteration (BLOCK_K)."""
    warps: int
    stages: int


LINEAR_LAUNCHES: dict[int, LinearLaunch] = {1: LinearLaunch(4, 1024, 2, 3), 16: LinearLaunch(16, 512, 2, 3)}
"""Launch by maximum number of rows; benchmarks/tune_triton.py measures the values."""


def few_rows_linear_reference(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`few_rows_linear` in plain PyTorch."""
    return functional.linear(input, weight, bias)


def is_worth_it(input: Tensor, weight: Tensor) -> bool:
    """Return whether :func:`few_rows_linear` supports these tensors and is faster than cuBLAS.

    The answer depends on dtypes, shapes and strides alone.
    """
    return (
        input.ndim == 2
        and 0 < len(input) <= MOST_ROWS
        and input.dtype == weight.dtype
        and input.dtype in (torch.bfloat16, torch.float16)
        and weight.numel() * weight.element_size() <= MOST_BYTES
        and weight.is_contiguous()
        and input.stride(1) == 1
    )


def few_rows_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, launch: LinearLaunch | None = None
) -> Tensor:
    """Return ``input @ weight.T + bias`` for up to 16 rows: [rows, outs] in the input's dtype.

    ``input`` is [rows, ins], ``weight`` [outs, ins], ``bias`` [outs], all of one dtype. Rows of the input may have any
    stride; weight and bias must be contiguous. Raises UsageError for inconsistent tensors.
    """
    check_same_device(input, weight, bias)
    if input.ndim != 2 or weight.ndim != 2 or input.shape[1] != weight.shape[1] or len(input) > MOST_ROWS:
        raise UsageError(
            f"input {list(input.shape)} and weight {list(weight.shape)}: expected [rows, ins] of at most {MOST_ROWS} "
            "rows and [outs, ins]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UsageError(f"bias {list(bias.shape)}: expected one per output ({len(weight)})")
    if any(each is not None and each.dtype != input.dtype for each in (weight, bias)):
        raise UsageError(f"input, weight and bias must have one dtype; the input is {input.dtype}")
    if not weight.is_contiguous() or input.stride(1) != 1 or not (bias is None or bias.is_contiguous()):
        raise UsageError("the weight, the bias and each row of the input must be contiguous")
    (rows, ins), outs = input.shape, len(weight)
    output = input.new_empty(rows, outs)
    if not output.numel():
        return output
    config = launch or next(LINEAR_LAUNCHES[max_rows] for max_rows in LINEAR_LAUNCHES if rows <= max_rows)
    constants = {
        "BLOCK_M": 1 if rows == 1 else max(16, next_power(rows)),
        "BLOCK_N": config.outputs,
        "BLOCK_K": min(config.block, max(16, next_power(ins))),
    }
    args = input, weight, bias, output, rows, ins, outs, input.stride(0)
    grid = -(-outs // config.outputs), 1, 1
    _launch(input.device, grid, args, constants, num_warps=config.warps, num_stages=config.stages)
    return output


@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    input, weight, bias, output, rows, ins, outs, input_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of all rows."""
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    w_ptrs = weight + n.to(tl.int64)[:, None] * ins + k
    wait_for_previous(IS_OVERLAPPED)
    if BLOCK_M == 1:
        sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.range(0, ins, BLOCK_K):
            k_mask = start + k < ins
            w = tl.load(w_ptrs + start, mask=(n < outs)[:, None] & k_mask, other=0.0).to(tl.float32)
            sums += w * tl.load(input + start + k, mask=k_mask, other=0.0).to(tl.float32)
        total = tl.sum(sums, 1)
        if bias is not None:
            total += tl.load(bias + n, mask=n < outs, other=0.0).to(tl.float32)
        tl.store(output + n, total.to(output.dtype.element_ty), mask=n < outs)
    else:
        m = tl.arange(0, BLOCK_M)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        x_ptrs = input + m[None, :] * input_row + k[:, None]
        for start in tl.range(0, ins, BLOCK_K):
            k_mask = start + k < ins
            w = tl.load(w_ptrs + start, mask=(n < outs)[:, None] & k_mask, other=0.0)
            x = tl.load(x_ptrs + start, mask=(m < rows) & k_mask[:, None], other=0.0)
            acc = tl.dot(w, x, acc, input_precision="ieee")
        if bias is not None:
            acc += tl.load(bias + n, mask=n < outs, other=0.0).to(tl.float32)[:, None]
        out_ptrs = output + m[None, :] * outs + n[:, None]
        tl.store(out_ptrs, acc.to(output.dtype.element_ty), mask=(m < rows) & (n < outs)[:, None])


_launch = Launcher(_few_rows_kernel, overlaps=True)
