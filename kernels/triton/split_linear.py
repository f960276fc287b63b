"""Split-K linear layer for 17 to 32 rows (batched decoding): output[m, n] = sum_k input[m, k] * weight[n, k] + bias[n].

The weight is read once, and reading it takes less time than the launch latency between two kernels. Each program
therefore loads its whole part of the weight into shared memory before it waits for the previous kernel, and reads the
input only afterwards (programmatic dependent launch, PDL). The last program of a tile to finish adds up the splits in
order, so the summation order is fixed. Sums are accumulated in float32 and rounded once. The gate and up projections of
a gated MLP (arXiv:2002.05202) can be fused with act(gate) * up, with the rounding of kernels/triton/activation.py.
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
"""Maximum size of a weight in bytes; larger weights are read as fast by cuBLAS."""
_TILE = 64
"""Rows of the weight per program (BLOCK_N)."""
_TARGET_PROGRAMS = 64
"""Target number of programs. More splits do not pay off: a layer of Qwen3-0.6B took 22.4 us with 128, 20.1 with 64."""
_MAX_SPLITS, _MAX_SPLIT_SIZE = 4, 1024


class Parts(NamedTuple):
    """Split-K configuration: each of ``splits`` programs processes ``chunks`` blocks of ``block`` features."""

    splits: int
    chunks: int
    block: int


@functools.lru_cache(maxsize=256)
def parts_of(outs: int, ins: int) -> Parts | None:
    """Return the split-K configuration of a weight [outs, ins], or None if the shape is unsupported."""
    tiles, splits = outs // _TILE, 1
    while splits < _MAX_SPLITS and 2 * splits * tiles <= _TARGET_PROGRAMS:
        splits *= 2
    if outs % _TILE or ins % (256 * splits) or ins // splits > _MAX_SPLIT_SIZE:
        return None
    size = ins // splits
    return Parts(splits, size // 512, 512) if size % 512 == 0 else Parts(splits, size // 256, 256)


def split_linear_reference(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, kind: str | None = None
) -> Tensor:
    """Compute :func:`split_linear` in plain PyTorch."""
    output = functional.linear(input, weight, bias)
    if kind is None:
        return output
    gate, up = output.chunk(2, dim=-1)
    return gated_reference(gate, up, kind)


def is_worth_it(input: Tensor, weight: Tensor) -> bool:
    """Return whether :func:`split_linear` supports these tensors and is faster than cuBLAS.

    The answer depends on device, dtypes, shapes and strides alone.
    """
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
    """Return ``input @ weight.T + bias`` for up to 32 rows: [rows, outs] in the input's dtype.

    ``input`` is [rows, ins], ``weight`` [outs, ins], ``bias`` [outs], all of one dtype. Rows of the input may have any
    stride; weight and bias must be contiguous. With ``kind``, an activation of :data:`.activation.KINDS`, the output is
    act(gate) * up, [rows, outs / 2]; the first half of the weight computes the gate. ``is_constant`` promises that the
    previously launched kernel does not write the weight, so that this kernel may read it early (PDL). Calls on several
    streams of a device must not run concurrently, because they share counters. Raises UsageError for an unknown
    activation and for inconsistent tensors.
    """
    check_same_device(input, weight, bias)
    if input.ndim != 2 or weight.ndim != 2 or input.shape[1] != weight.shape[1] or len(input) > MOST_ROWS:
        raise UsageError(
            f"input {list(input.shape)} and weight {list(weight.shape)}: expected [rows, ins] of at most {MOST_ROWS} "
            "rows and [outs, ins]"
        )
    parts = parts_of(*weight.shape)
    if parts is None:
        raise UsageError(f"weight {list(weight.shape)} cannot be cut into parts of {_TILE} x {_MAX_SPLIT_SIZE} at most")
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
    """Return the counters of finished splits per tile; zero between launches."""
    return torch.zeros(_TARGET_PROGRAMS, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["rows"])
def _split_kernel(
    input, weight, bias, output, partial, counters, rows, ins, outs, input_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr, SPLITS: tl.constexpr,
    KIND: tl.constexpr, IS_CONSTANT: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Compute one split (CHUNKS blocks of features) of BLOCK_N outputs, or of BLOCK_N / 2 gate/up pairs with a KIND.

    The last split of a tile to finish reduces the splits and stores the output.
    """
    if IS_OVERLAPPED:
        gdc_launch_dependents()
        if not IS_CONSTANT:
            gdc_wait()
    tile, split = tl.program_id(0), tl.program_id(1)
    HALF: tl.constexpr = BLOCK_N // 2
    m, j, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    n = tile * BLOCK_N + j if KIND < 0 else tile * HALF + j % HALF + j // HALF * (outs // 2)
    w_ptrs = weight + n.to(tl.int64)[:, None] * ins + split * (CHUNKS * BLOCK_K) + k[None, :]
    w0 = tl.load(w_ptrs)
    if CHUNKS > 1:
        w1 = tl.load(w_ptrs + BLOCK_K)
    if CHUNKS > 2:
        w2 = tl.load(w_ptrs + 2 * BLOCK_K)
    if IS_OVERLAPPED and IS_CONSTANT:
        gdc_wait()
    x_ptrs = input + m[None, :] * input_row + split * (CHUNKS * BLOCK_K) + k[:, None]
    row_mask = (m < rows)[None, :]
    acc = tl.dot(w0, tl.load(x_ptrs, mask=row_mask, other=0.0), input_precision="ieee")
    if CHUNKS > 1:
        acc = tl.dot(w1, tl.load(x_ptrs + BLOCK_K, mask=row_mask, other=0.0), acc, input_precision="ieee")
    if CHUNKS > 2:
        acc = tl.dot(w2, tl.load(x_ptrs + 2 * BLOCK_K, mask=row_mask, other=0.0), acc, input_precision="ieee")
    out_offset = m[None, :] * outs + n[:, None]
    is_last = True
    if SPLITS > 1:
        tl.store(partial + split * (BLOCK_M * outs) + out_offset, acc)
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        if SPLITS > 1:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for part in tl.static_range(SPLITS):
                acc += tl.load(partial + part * (BLOCK_M * outs) + out_offset)
            tl.store(counters + tile, 0)
        if bias is not None:
            acc += tl.load(bias + n).to(tl.float32)[:, None]
        dtype: tl.constexpr = output.dtype.element_ty
        if KIND < 0:
            tl.store(output + out_offset, acc.to(dtype), mask=row_mask)
        else:
            halves = tl.reshape(acc.to(dtype).to(tl.float32), (2, HALF, BLOCK_M))
            gate, up = tl.split(tl.permute(halves, (1, 2, 0)))
            out_ptrs = output + m[None, :] * (outs // 2) + (tile * HALF + tl.arange(0, HALF))[:, None]
            tl.store(out_ptrs, (activated(gate, KIND).to(dtype).to(tl.float32) * up).to(dtype), mask=row_mask)


_launch = Launcher(_split_kernel, overlaps=True)
