"""Linear layer of few rows: output[m, n] = sum_k input[m, k] * weight[n, k] + bias[n], as in decoding.

With few rows the time is that of reading the weight once. Each program takes BLOCK_N rows of the weight and all rows
of the input, which stay in the cache; nothing is split along k, so that one kernel suffices and a sum has one order.
Sums are in float32 and rounded once.
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
"""Of more rows torch's library is the faster."""
MOST_BYTES = 48 << 20
"""Of a weight: larger ones torch's library reads as fast."""


class LinearLaunch(NamedTuple):
    """How the kernel is compiled for a number of rows."""

    outputs: int
    """Rows of the weight that a program takes."""
    block: int
    """Features of one iteration."""
    warps: int
    stages: int


LINEAR_LAUNCHES: dict[int, LinearLaunch] = {1: LinearLaunch(4, 1024, 2, 3), 16: LinearLaunch(16, 512, 2, 3)}
"""By the number of rows, up to; benchmarks/tune_triton.py measures them."""


def few_rows_linear_reference(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What :func:`few_rows_linear` computes."""
    return functional.linear(input, weight, bias)


def is_worth_it(input: Tensor, weight: Tensor) -> bool:
    """Whether :func:`few_rows_linear` takes these and is the faster way; told by dtypes and shapes alone."""
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
    """[rows, ins], [outs, ins], [outs] -> [rows, outs], of up to 16 rows, in the input's dtype, which all have.

    Rows of the input may be apart; the weight and the bias are contiguous. Raises UsageError for tensors that do not
    fit together.
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
    chosen = launch or next(LINEAR_LAUNCHES[most] for most in LINEAR_LAUNCHES if rows <= most)
    constants = {
        "BLOCK_M": 1 if rows == 1 else max(16, next_power(rows)),
        "BLOCK_N": chosen.outputs,
        "BLOCK_K": min(chosen.block, max(16, next_power(ins))),
    }
    args = input, weight, bias, output, rows, ins, outs, input.stride(0)
    grid = -(-outs // chosen.outputs), 1, 1
    _launch(input.device, grid, args, constants, num_warps=chosen.warps, num_stages=chosen.stages)
    return output


@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    input, weight, bias, output, rows, ins, outs, input_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of all rows."""
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    at = weight + n.to(tl.int64)[:, None] * ins + k
    wait_for_previous(IS_OVERLAPPED)
    if BLOCK_M == 1:
        sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.range(0, ins, BLOCK_K):
            real = start + k < ins
            w = tl.load(at + start, mask=(n < outs)[:, None] & real, other=0.0).to(tl.float32)
            sums += w * tl.load(input + start + k, mask=real, other=0.0).to(tl.float32)
        total = tl.sum(sums, 1)
        if bias is not None:
            total += tl.load(bias + n, mask=n < outs, other=0.0).to(tl.float32)
        tl.store(output + n, total.to(output.dtype.element_ty), mask=n < outs)
    else:
        m = tl.arange(0, BLOCK_M)
        mixed = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        x_at = input + m[None, :] * input_row + k[:, None]
        for start in tl.range(0, ins, BLOCK_K):
            real = start + k < ins
            w = tl.load(at + start, mask=(n < outs)[:, None] & real, other=0.0)
            x = tl.load(x_at + start, mask=(m < rows) & real[:, None], other=0.0)
            mixed = tl.dot(w, x, mixed, input_precision="ieee")
        if bias is not None:
            mixed += tl.load(bias + n, mask=n < outs, other=0.0).to(tl.float32)[:, None]
        to = output + m[None, :] * outs + n[:, None]
        tl.store(to, mixed.to(output.dtype.element_ty), mask=(m < rows) & (n < outs)[:, None])


_launch = Launcher(_few_rows_kernel, overlaps=True)
