"""The counters of sketches on the device; the hash and the plain reference are in kernels/native/sketch.py.

Counters need no scatter: within a block of 256 columns the place of an element is its column XOR a number that all of
the block share. So a lane of a warp keeps the eight counters that are 32 apart, and loads the elements that belong to
them: they have one hash, of which each takes its sign from another bit.

Programs share a tensor and each writes partial counters; :meth:`Sketches.merge` adds up those of all tensors in one
launch, in a fixed order. Sums are taken in float32 within a program and in float64 across.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.launch import Launcher, check_same_device, num_sms
from tapscope.kernels.triton.statistics import value_of
from tapscope.kernels.triton.tap import FORMATS

COUNTERS = 256
"""As :data:`tapscope.run_format.sketch.COUNTERS`."""
TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The types that are served."""
PADDING = -1
"""Key of a row that no sketch contains."""
_WARPS = 16
_ROWS = 2 * _WARPS  # blocks of 256 columns that a program adds at a time
_SPAN = 3  # words that say where the partial counters of a tensor are: first, how many, address of the sum
_TILE = 32  # partial counters that the merge loads at a time


class Part(NamedTuple):
    """The columns of a local tensor [rows, width] that are in a sketch: one run of consecutive ones."""

    rows: int
    width: int
    first: int
    """First local column."""
    column: int
    """Its column in the whole tensor."""
    num_columns: int

    @property
    def num_programs(self) -> int:
        """Programs that find enough to do."""
        return max(1, -(-self.rows * self._blocks // _ROWS))

    @property
    def _blocks(self) -> int:
        end = self.column + self.num_columns
        return -(-end // COUNTERS) - self.column // COUNTERS if self.num_columns else 0

    @property
    def is_whole(self) -> bool:
        """Whether it consists of whole blocks."""
        return self.column % COUNTERS == 0 and self.num_columns % COUNTERS == 0


class Sketches:
    """Sketches of up to ``capacity`` tensors of one stream, complete after :meth:`merge`."""

    def __init__(self, device: torch.device, capacity: int, room: int | None = None) -> None:
        """``room``: partial counters of 1 KiB between two merges, those of 64 large tensors if not given."""
        self.most = num_sms(device)
        """Programs that share a tensor at most."""
        self._room = 64 * self.most if room is None else room
        self._partial = torch.empty(self._room, COUNTERS, device=device)
        self._spans = torch.zeros(capacity, _SPAN, dtype=torch.int64, device=device)
        self._used = 0

    @property
    def has_room(self) -> bool:
        """Whether a tensor of any size fits in before the next merge."""
        return self._used + self.most <= self._room

    def add(self, tensor: Tensor, keys: Tensor, part: Part, index: int, out: int) -> None:
        """Begin the sketch of ``tensor``, which is contiguous: number ``index`` between two merges.

        ``keys`` [rows] int64: the row keys (32 bits), or :data:`PADDING`. The counters, [256] float32, come to the
        address ``out``. Raises UsageError for a type that is not in :data:`TYPES`.
        """
        if tensor.dtype not in TYPES or not tensor.is_contiguous():
            raise UsageError(f"no sketch of {tensor.dtype} {list(tensor.shape)}: contiguous floats are needed")
        programs = min(part.num_programs, self.most)
        span = self._spans.data_ptr() + 8 * _SPAN * index
        args = tensor.data_ptr(), *part, keys.data_ptr(), self._used, span, out, self._partial
        _launch_sketch(tensor.device, (programs, 1, 1), args, _constants(tensor.dtype, part.is_whole), num_warps=_WARPS)
        self._used += programs

    def merge(self, count: int) -> None:
        """Complete the first ``count`` sketches; the next ones are numbered from 0."""
        self._used = 0
        if count:
            _launch_merge(self._partial.device, (count, 1, 1), (self._spans, self._partial), {"TILE": _TILE})


def sketch(values: Tensor, keys: Tensor, column: int = 0) -> Tensor:
    """[256] float32: the counters of ``values`` [rows, columns], whose first column is ``column`` of the whole tensor.

    ``keys`` [rows] int64: the row keys, or :data:`PADDING`. Raises UsageError for other types and shapes.
    """
    check_same_device(values, keys)
    if values.ndim != 2:
        raise UsageError(f"values are {values.dtype} {list(values.shape)}: floats [rows, columns] are needed")
    rows, width = values.shape
    if keys.shape != (rows,) or keys.dtype != torch.int64:
        raise UsageError(f"keys are {keys.dtype} {list(keys.shape)}: int64 [{rows}] is needed")
    found = torch.zeros(COUNTERS, device=values.device)
    sketches = Sketches(values.device, 1, num_sms(values.device))
    sketches.add(values, keys, Part(rows, width, 0, column, width), 0, found.data_ptr())
    sketches.merge(1)
    return found


def _constants(dtype: torch.dtype, is_whole: bool) -> dict[str, object]:
    form = FORMATS[dtype]
    return {"BITS": form.bits, "MANTISSA": form.mantissa, "ROWS": _ROWS, "IS_WHOLE": is_whole}


@triton.jit
def _mix32(h):
    """The finaliser of MurmurHash3, of uint32 values."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _add(
    sums, k: tl.constexpr, data, start, shift, lane, word, there, first, count, BITS: tl.constexpr,
    MANTISSA: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Counters ``32 k + lane`` with the elements of some blocks that belong to them.

    [blocks, lanes]: ``start`` is where a block begins in the tensor, ``first`` in the columns of the sketch.
    """
    element = (lane + 32 * k) ^ shift
    if IS_WHOLE:
        inside = there
    else:
        local = first + element
        inside = there & (local >= 0) & (local < count)
    bits = tl.load(data + (start + element), mask=inside, other=0)
    if BITS == 32:
        value = bits.to(tl.float32, bitcast=True)
    else:
        value = value_of(bits.to(tl.int32), True, True, BITS, MANTISSA)
    value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
    negative = (word << (7 - (element >> 5)).to(tl.uint32)) & 0x80000000
    return sums + (value.to(tl.uint32, bitcast=True) ^ negative).to(tl.float32, bitcast=True)


@triton.jit(
    do_not_specialize=[
        "address", "rows", "width", "first", "column", "count", "keys", "begin", "span", "out"
    ]
)  # fmt: skip
def _sketch_kernel(
    address, rows, width, first, column, count, keys, begin, span, out, partial, BITS: tl.constexpr,
    MANTISSA: tl.constexpr, ROWS: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Every n-th group of blocks of one tensor that n programs share. The first one writes where all of them leave
    their counters."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    wide = program.to(tl.int64) * 0
    rows, width, first, column, count = wide + rows, wide + width, wide + first, wide + column, wide + count
    begin, out = wide + begin, wide + out
    if BITS == 32:
        data = (wide + address).to(tl.pointer_type(tl.uint32))
    else:
        data = (wide + address).to(tl.pointer_type(tl.uint16))
    row_keys = (wide + keys).to(tl.pointer_type(tl.int64))
    base = column // 256
    blocks = tl.where(count > 0, (column + count + 255) // 256 - base, 0)
    total = rows * blocks
    used = tl.minimum(tl.maximum((total + ROWS - 1) // ROWS, 1), programs)
    if program < used:
        lane = tl.arange(0, 32)[None, :]
        s0 = tl.zeros((ROWS, 32), tl.float32)
        s1, s2, s3, s4, s5, s6, s7 = s0, s0, s0, s0, s0, s0, s0
        narrow = tl.maximum(blocks, 1).to(tl.uint32)
        for group in tl.range(program, (total + ROWS - 1) // ROWS, used):
            unit = (wide + group) * ROWS + tl.arange(0, ROWS)
            row = (unit.to(tl.uint32) // narrow).to(tl.int64)
            block = unit - row * blocks
            key = tl.load(row_keys + row, mask=unit < total, other=-1)
            there = (key >= 0)[:, None]
            mixed = _mix32(key.to(tl.uint32) + (block + base).to(tl.uint32) * 0x9E3779B1)[:, None]
            shift = (mixed >> 24).to(tl.int32)
            low = lane ^ (shift & 31)  # the last five bits of a lane's elements
            word = _mix32(mixed ^ ((low + 1).to(tl.uint32) * 0x85EBCA77))
            local = ((block + base) * 256 - column)[:, None]  # column of the sketch where the block begins
            start = (row * width + first)[:, None] + local
            s0 = _add(s0, 0, data, start, shift, lane, word, there, local, count, BITS, MANTISSA, IS_WHOLE)
            s1 = _add(s1, 1, data, start, shift, lane, word, there, local, count, BITS, MANTISSA, IS_WHOLE)
            s2 = _add(s2, 2, data, start, shift, lane, word, there, local, count, BITS, MANTISSA, IS_WHOLE)
            s3 = _add(s3, 3, data, start, shift, lane, word, there, local, count, BITS, MANTISSA, IS_WHOLE)
            s4 = _add(s4, 4, data, start, shift, lane, word, there, local, count, BITS, MANTISSA, IS_WHOLE)
            s5 = _add(s5, 5, data, start, shift, lane, word, there, local, count, BITS, MANTISSA, IS_WHOLE)
            s6 = _add(s6, 6, data, start, shift, lane, word, there, local, count, BITS, MANTISSA, IS_WHOLE)
            s7 = _add(s7, 7, data, start, shift, lane, word, there, local, count, BITS, MANTISSA, IS_WHOLE)
        to = partial + (begin + program) * 256 + tl.arange(0, 32)
        tl.store(to, tl.sum(s0, 0))
        tl.store(to + 32, tl.sum(s1, 0))
        tl.store(to + 64, tl.sum(s2, 0))
        tl.store(to + 96, tl.sum(s3, 0))
        tl.store(to + 128, tl.sum(s4, 0))
        tl.store(to + 160, tl.sum(s5, 0))
        tl.store(to + 192, tl.sum(s6, 0))
        tl.store(to + 224, tl.sum(s7, 0))
        if program == 0:
            place = (wide + span).to(tl.pointer_type(tl.int64))
            tl.store(place, begin)
            tl.store(place + 1, used.to(tl.int64))
            tl.store(place + 2, out)


@triton.jit
def _merge_kernel(spans, partial, TILE: tl.constexpr):
    """The counters of one tensor, from the partial ones of its programs in order."""
    span = spans + 3 * tl.program_id(0)
    begin, count, out = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    counter = tl.arange(0, 256)[None, :]
    if count > 0:
        total = tl.zeros((256,), tl.float64)
        for first in tl.range(0, count.to(tl.int32), TILE):
            number = first + tl.arange(0, TILE)[:, None]
            some = tl.load(partial + (begin + number) * 256 + counter, mask=number < count, other=0.0)
            total += tl.sum(some.to(tl.float64), 0)
        tl.store(out.to(tl.pointer_type(tl.float32)) + tl.arange(0, 256), total.to(tl.float32))
        tl.store(span + 1, count * 0)


_launch_sketch = Launcher(_sketch_kernel)
_launch_merge = Launcher(_merge_kernel)
