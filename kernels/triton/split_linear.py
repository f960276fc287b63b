"""Linear layer of 17 to 32 rows: output[m, n] = sum_k input[m, k] * weight[n, k] + bias[n], as in decoding a batch.

The weight is read once, and reading it takes less time than one kernel takes to start after another. So each program
takes all of its part of the weight into shared memory before it waits for the previous kernel, and reads the input
only then (programmatic dependent launch). Parts along k are added by the program of a tile that is done last, in the
order of the parts: a sum has one order. Sums are in float32 and rounded once. The two linears of a gated MLP,
arXiv:2002.05202, can be one kernel with act(gate) * up, with the roundings of kernels/triton/activation.py.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.activation import KINDS, activated, gated_reference
from tapscope.kernels.triton.launch import Launcher, check_same_device, may_overlap

LEAST_ROWS, MOST_ROWS = 17, 32
MOST_BYTES = 16 << 20
"""Of a weight: larger ones torch's library reads as fast."""
_TILE = 64
"""Rows of the weight that a program takes."""
_PROGRAMS = 64
"""More parts along k cost more than they bring: a layer of Qwen3-0.6B took 22.4 us with 128 programs, 20.1 with 64."""
_MOST_SPLITS, _MOST_PART = 4, 1024


class Parts(NamedTuple):
    """How the features of the input are cut: ``splits`` programs take ``chunks`` blocks of ``block`` each."""

    splits: int
    chunks: int
    block: int


@functools.lru_cache(maxsize=256)
def parts_of(outs: int, ins: int) -> Parts | None:
    """For a weight [outs, ins]; None if it cannot be cut."""
    tiles, splits = outs // _TILE, 1
    while splits < _MOST_SPLITS and 2 * splits * tiles <= _PROGRAMS:
        splits *= 2
    if outs % _TILE or ins % (256 * splits) or ins // splits > _MOST_PART:
        return None
    size = ins // splits
    return Parts(splits, size // 512, 512) if size % 512 == 0 else Parts(splits, size // 256, 256)


def split_linear_reference(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, kind: str | None = None
) -> Tensor:
    """What :func:`split_linear` computes."""
    output = functional.linear(input, weight, bias)
    if kind is None:
        return output
    gate, up = output.chunk(2, dim=-1)
    return gated_reference(gate, up, kind)


def is_worth_it(input: Tensor, weight: Tensor) -> bool:
    """Whether :func:`split_linear` takes these and is the faster way; told by device, dtypes and shapes alone."""
    return (
        input.ndim == 2
        and LEAST_ROWS <= len(input) <= MOST_ROWS
        and input.dtype == weight.dtype
        and input.dtype in (torch.bfloat16, torch.float16)
        and weight.numel() * weight.element_size() <= MOST_BYTES
        and may_overlap(input.device)
        and parts_of(*weight.shape) is not None
        and weight.is_contiguous()
        and input.stride(1) == 1
    )


def split_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, kind: str | None = None, *, is_constant: bool = False
) -> Tensor:
    """[rows, ins], [outs, ins], [outs] -> [rows, outs], of up to 32 rows, in the input's dtype, which all have.

    Rows of the input may be apart; the weight and the bias are contiguous. ``kind``: an activation of
    :data:`.activation.KINDS`; the output is then [rows, outs / 2], and the weight's first half makes the gate.
    ``is_constant``: the kernel launched last does not write the weight, so that this one may read it early. Calls on
    several streams of a device must not run at the same time: they share counters. Raises UsageError for another
    activation, and for tensors that do not fit together.
    """
    check_same_device(input, weight, bias)
    if input.ndim != 2 or weight.ndim != 2 or input.shape[1] != weight.shape[1] or len(input) > MOST_ROWS:
        raise UsageError(
            f"input {list(input.shape)} and weight {list(weight.shape)}: expected [rows, ins] of at most {MOST_ROWS} "
            "rows and [outs, ins]"
        )
    parts = parts_of(*weight.shape)
    if parts is None:
        raise UsageError(f"weight {list(weight.shape)} cannot be cut into parts of {_TILE} x {_MOST_PART} at most")
    if any(each is not None and each.dtype != input.dtype for each in (weight, bias)):
        raise UsageError(f"input, weight and bias must have one dtype; the input is {input.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UsageError(f"bias {list(bias.shape)}: expected one per output ({len(weight)})")
    if not weight.is_contiguous() or input.stride(1) != 1 or not (bias is None or bias.is_contiguous()):
        raise UsageError("the weight, the bias and each row of the input must be contiguous")
    if kind is not None and kind not in KINDS:
        raise UsageError(f"activation {kind!r}: expected one of {', '.join(KINDS)}")
    (rows, ins), outs, device = input.shape, len(weight), input.device
    output = input.new_empty(rows, outs if kind is None else outs // 2)
    if not rows:
        return output
    partial = torch.empty(parts.splits, MOST_ROWS, outs, dtype=torch.float32, device=device)
    args = input, weight, bias, output, partial, _counters(device), rows, ins, outs, input.stride(0)
    constants = {
        "BLOCK_M": MOST_ROWS, "BLOCK_N": _TILE, "BLOCK_K": parts.block, "CHUNKS": parts.chunks, "SPLITS": parts.splits,
        "KIND": -1 if kind is None else KINDS.index(kind), "IS_CONSTANT": is_constant,
    }  # fmt: skip
    _launch(device, (outs // _TILE, parts.splits, 1), args, constants, num_warps=4, num_stages=1)
    return output


@functools.lru_cache(maxsize=64)
def _counters(device: torch.device) -> Tensor:
    """Parts of each tile that are done; zeros between launches."""
    return torch.zeros(_PROGRAMS, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["rows"])
def _split_kernel(
    input, weight, bias, output, partial, counters, rows, ins, outs, input_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr, SPLITS: tl.constexpr,
    KIND: tl.constexpr, IS_CONSTANT: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of all rows, of CHUNKS blocks of features; with a KIND the gates of one half and their others."""
    if IS_OVERLAPPED:
        gdc_launch_dependents()
        if not IS_CONSTANT:
            gdc_wait()
    tile, split = tl.program_id(0), tl.program_id(1)
    HALF: tl.constexpr = BLOCK_N // 2
    m, j, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    n = tile * BLOCK_N + j if KIND < 0 else tile * HALF + j % HALF + j // HALF * (outs // 2)
    at = weight + n.to(tl.int64)[:, None] * ins + split * (CHUNKS * BLOCK_K) + k[None, :]
    first = tl.load(at)
    if CHUNKS > 1:
        second = tl.load(at + BLOCK_K)
    if CHUNKS > 2:
        third = tl.load(at + 2 * BLOCK_K)
    if IS_OVERLAPPED and IS_CONSTANT:
        gdc_wait()
    x = input + m[None, :] * input_row + split * (CHUNKS * BLOCK_K) + k[:, None]
    real = (m < rows)[None, :]
    mixed = tl.dot(first, tl.load(x, mask=real, other=0.0), input_precision="ieee")
    if CHUNKS > 1:
        mixed = tl.dot(second, tl.load(x + BLOCK_K, mask=real, other=0.0), mixed, input_precision="ieee")
    if CHUNKS > 2:
        mixed = tl.dot(third, tl.load(x + 2 * BLOCK_K, mask=real, other=0.0), mixed, input_precision="ieee")
    to = m[None, :] * outs + n[:, None]
    is_last = True
    if SPLITS > 1:
        tl.store(partial + split * (BLOCK_M * outs) + to, mixed)
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        if SPLITS > 1:
            mixed = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for part in tl.static_range(SPLITS):
                mixed += tl.load(partial + part * (BLOCK_M * outs) + to)
            tl.store(counters + tile, 0)
        if bias is not None:
            mixed += tl.load(bias + n).to(tl.float32)[:, None]
        dtype: tl.constexpr = output.dtype.element_ty
        if KIND < 0:
            tl.store(output + to, mixed.to(dtype), mask=real)
        else:
            halves = tl.reshape(mixed.to(dtype).to(tl.float32), (2, HALF, BLOCK_M))
            gate, up = tl.split(tl.permute(halves, (1, 2, 0)))
            into = output + m[None, :] * (outs // 2) + (tile * HALF + tl.arange(0, HALF))[:, None]
            tl.store(into, (activated(gate, KIND).to(dtype).to(tl.float32) * up).to(dtype), mask=real)


_launch = Launcher(_split_kernel, overlaps=True)
