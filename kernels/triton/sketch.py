"""The counters of a sketch on the device; the hash and the plain reference are in kernels/native/sketch.py.

Counters need no scatter: within a block of 256 columns the place of an element is its column XOR a number that all of
the block share, so that each lane loads the element that belongs to its counter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.launch import Launcher, check_same_device, num_sms

COUNTERS = 256
"""As :data:`tapscope.run_format.sketch.COUNTERS`."""
TYPES = (torch.float32, torch.float16, torch.bfloat16)
_ROWS = tl.constexpr(4)  # blocks of 256 columns that a program adds at a time
_BLOCKS_PER_PROGRAM = 256


def sketch(values: Tensor, keys: Tensor, valid: Tensor, column: int = 0) -> Tensor:
    """[256] float32: the counters of ``values`` [rows, columns], whose first column is ``column`` of the whole tensor.

    ``keys`` [rows] int32 holds the bits of the row keys, ``valid`` [rows] int8 is 0 for padding. Sums are taken in
    float32 within a program and in float64 across, in a fixed order. Raises UsageError for other types and shapes.
    """
    check_same_device(values, keys, valid)
    if values.dtype not in TYPES or values.ndim != 2 or not values.is_contiguous():
        raise UsageError(
            f"values are {values.dtype} {list(values.shape)}: contiguous floats [rows, columns] are needed"
        )
    rows, width = values.shape
    if keys.shape != (rows,) or valid.shape != (rows,) or (keys.dtype, valid.dtype) != (torch.int32, torch.int8):
        raise UsageError(f"keys and valid: int32 and int8 [{rows}] are needed")
    first = column // COUNTERS
    blocks = -(-(column + width) // COUNTERS) - first
    total = rows * blocks
    if not total or not width:
        return torch.zeros(COUNTERS, device=values.device)
    programs = max(1, min(-(-total // 4), 4 * num_sms(values.device)), -(-total // (_BLOCKS_PER_PROGRAM * 16)))
    partial = torch.empty(programs, COUNTERS, device=values.device)
    args = values, keys, valid, partial, rows, width, column, first, blocks
    _launch_sketch(values.device, (programs, 1, 1), args, {}, num_warps=4)
    return partial.double().sum(0).float()


@triton.jit
def _mix32(h):
    """The finaliser of MurmurHash3, of uint32 values."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit(do_not_specialize=["rows", "width", "column", "first", "blocks"])
def _sketch_kernel(values, keys, valid, partial, rows, width, column, first, blocks):
    """Every n-th group of blocks of one tensor that n programs share."""
    program = tl.program_id(0)
    lane = tl.arange(0, 256)[None, :]
    sums = tl.zeros((_ROWS, 256), tl.float32)
    total = rows.to(tl.int64) * blocks
    for start in tl.range(program * _ROWS, total, tl.num_programs(0) * _ROWS):
        unit = start + tl.arange(0, _ROWS).to(tl.int64)
        there = unit < total
        row, block = unit // blocks, unit % blocks + first
        there = there & (tl.load(valid + row, mask=there, other=0) != 0)
        key = tl.load(keys + row, mask=there, other=0).to(tl.uint32, bitcast=True)
        mixed = _mix32(key + block.to(tl.uint32) * 0x9E3779B1)[:, None]
        element = lane ^ (mixed >> 24).to(tl.int32)
        local = block[:, None] * 256 + element - column
        inside = there[:, None] & (local >= 0) & (local < width)
        value = tl.load(values + row[:, None] * width + local, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
        word = _mix32(mixed ^ (((element & 31) + 1).to(tl.uint32) * 0x85EBCA77))
        negative = (word >> (24 + (element >> 5)).to(tl.uint32)) & 1
        sums += tl.where(negative != 0, -value, value)
    tl.store(partial + program * 256 + tl.arange(0, 256), tl.sum(sums, 0))


_launch_sketch = Launcher(_sketch_kernel)
