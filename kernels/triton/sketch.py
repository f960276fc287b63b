"""Sketch counters computed on the device; the hash and the reference implementation are in kernels/native/sketch.py.

The counters need no scatter: within a block of 256 columns, the counter of an element is its column XOR a number
(``shift``) that the whole block shares. A thread therefore accumulates the same 16 or 32 counters throughout, as 8-byte
words 32 columns apart. It loads the words that contain the matching elements and permutes these in registers.
Elements 32 columns apart share a hash, and each takes its sign from a different bit.

Several programs share a tensor, and each writes partial counters; :meth:`Sketches.merge` adds up the partial counters
of all tensors in one launch, in a fixed order. Sums are float32 within a program and float64 across programs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.kernels.triton import is_interpreted
from tapscope.kernels.triton.launch import (
    HAS_PTX,
    DriverLaunch,
    Launcher,
    check_same_device,
    num_sms,
    wait_then_let_next,
)
from tapscope.kernels.triton.statistics import value_of
from tapscope.kernels.triton.tap import FORMATS

COUNTERS = 256
"""Counters of a sketch, equal to :data:`tapscope.run_format.sketch.COUNTERS`."""
TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Supported dtypes."""
PADDING = -1
"""Key of a row that sketches skip."""
NUM_WARPS = 4
"""Warps of a program that accumulates elements."""
PROGRAM_BYTES = NUM_WARPS * 8 * COUNTERS
"""Bytes of whole blocks that a program accumulates per iteration."""
_PROGRAMS_PER_SM = 4
_SPAN = 4  # words that describe the partial counters of a tensor: address, number, address of the result, unused
_TILE = 128  # partial counters that the merge loads per iteration
_MERGE_WARPS = 16


class Part(NamedTuple):
    """Contiguous range of the columns of a local tensor [rows, width] that a sketch covers."""

    rows: int
    width: int
    first: int
    """First column, in the local tensor."""
    column: int
    """Column of the unsharded tensor that corresponds to ``first``."""
    num_columns: int
    """Number of columns in the range."""

    @property
    def num_blocks(self) -> int:
        """Number of 256-column blocks of the unsharded tensor that the range touches, over all rows."""
        end = self.column + self.num_columns
        each = -(-end // COUNTERS) - self.column // COUNTERS if self.num_columns else 0
        return self.rows * each


class Sketches:
    """Buffers for the sketches of up to ``capacity`` tensors of one stream; :meth:`merge` completes the sketches."""

    def __init__(self, device: torch.device, capacity: int, room: int | None = None) -> None:
        """Allocate buffers for ``capacity`` tensors and ``room`` partial counters of 1 KiB between two merges.

        By default, ``room`` suffices for 40 large tensors (21 MB).
        """
        self.capacity = capacity
        """Maximum number of tensors between two merges."""
        self.most = most_programs(device)
        """Maximum number of programs that share a tensor."""
        self._room = 40 * self.most if room is None else room
        self._partial = torch.empty(self._room, COUNTERS, device=device)
        self._spans = torch.zeros(capacity, _SPAN, dtype=torch.int64, device=device)
        self._used = 0

    @property
    def has_room(self) -> bool:
        """Whether the buffer has space for another tensor of any size before the next merge."""
        return self._used + self.most <= self._room

    @property
    def place(self) -> tuple[int, int, int]:
        """Buffers for kernels launched elsewhere: (address of the partial counters, address of the spans, capacity).

        A span describes the partial counters of one tensor, see :func:`write_partial`. The capacity is the number of
        partial counters.
        """
        return self._partial.data_ptr(), self._spans.data_ptr(), self._room

    def add(self, tensor: Tensor, keys: Tensor, part: Part, index: int, out: int) -> None:
        """Start the sketch of ``tensor``, whose rows must be contiguous, as tensor ``index`` since the last merge.

        ``keys`` [rows] int64 holds the row keys (32 bits), or :data:`PADDING`. The merge writes the counters, [256]
        float32, to the address ``out``. Raises UsageError for other tensors and for a dtype that is not in
        :data:`TYPES`.
        """
        launch, args = self.take(tensor, keys, part, index, out)
        _launch_sketch(tensor.device, (launch.programs, 1, 1), args, launch.constants, num_warps=NUM_WARPS)

    def take(self, tensor: Tensor, keys: Tensor, part: Part, index: int, out: int) -> "tuple[_How, tuple[int, ...]]":
        """Reserve buffer space like :meth:`add`, but leave the launch to the caller.

        Returns the launch parameters and the arguments of :func:`write_partial` from ``address`` on.
        """
        step = _row_step(tensor, part)
        if tensor.dtype not in TYPES or step is None:
            raise UsageError(f"no sketch of {tensor.dtype} {list(tensor.shape)}: expected floats in contiguous rows")
        part = part._replace(width=step)
        launch = _How.of(tensor, part, self.most)
        span = self._spans.data_ptr() + 8 * _SPAN * index
        partial = self._partial.data_ptr() + 4 * COUNTERS * self._used
        self._used += launch.programs
        return launch, (tensor.data_ptr(), *part, keys.data_ptr(), partial, span, out)

    def merge(self, count: int) -> None:
        """Complete the first ``count`` sketches; indices of later sketches start from 0 again."""
        self._used = 0
        if count:
            _launch_merge(self._partial.device, (count, 1, 1), (self._spans,), {"TILE": _TILE}, num_warps=_MERGE_WARPS)


def most_programs(device: torch.device) -> int:
    """Return the maximum number of programs that share a tensor."""
    return _PROGRAMS_PER_SM * num_sms(device)


def sketch_launch(tensor: Tensor, part: Part, slot: int) -> DriverLaunch | None:
    """Return the driver launch of the sketch kernel for contiguous 16-byte-aligned tensors of this dtype and shape.

    The kernel parameters are the arguments of :func:`_sketch_kernel` before its constants, and two null pointers.
    ``slot`` is the index of the first key in a 16-byte-aligned buffer. None if :meth:`Sketches.add` has not launched
    this specialization yet.
    """
    if tensor.dtype not in TYPES or not tensor.is_contiguous() or tensor.data_ptr() % 16 or is_interpreted():
        return None
    launch = _How.of(tensor, part, most_programs(tensor.device))
    aligned_address = 1 << 40  # aligned, like all addresses except perhaps that of the keys
    args = tensor.data_ptr(), *part, aligned_address + 8 * (slot % 2), aligned_address, aligned_address, aligned_address
    direct = _launch_sketch.direct(tensor.device, args, launch.constants, num_warps=NUM_WARPS)
    if direct is None or direct.places != tuple(range(len(args))):
        return None
    return DriverLaunch(direct.function, launch.programs, direct.threads, direct.shared, direct.overlaps)


def sketch(values: Tensor, keys: Tensor, column: int = 0) -> Tensor:
    """Return the sketch of ``values`` [rows, columns] as [256] float32 counters.

    The first column of ``values`` is column ``column`` of the unsharded tensor. ``keys`` [rows] int64 holds the row
    keys, or :data:`PADDING`. Raises UsageError for other dtypes and shapes.
    """
    check_same_device(values, keys)
    if values.ndim != 2:
        raise UsageError(f"values are {values.dtype} {list(values.shape)}: expected floats [rows, columns]")
    rows, width = values.shape
    if keys.shape != (rows,) or keys.dtype != torch.int64:
        raise UsageError(f"keys are {keys.dtype} {list(keys.shape)}: expected int64 [{rows}]")
    counters = torch.zeros(COUNTERS, device=values.device)
    sketches = Sketches(values.device, 1, most_programs(values.device))
    sketches.add(values, keys, Part(rows, width, 0, column, width), 0, counters.data_ptr())
    sketches.merge(1)
    return counters


def _row_step(tensor: Tensor, part: Part) -> int | None:
    """Return the row stride in elements, or None if a row is not contiguous."""
    if tensor.is_contiguous():
        return part.width
    return tensor.stride(0) if len(tensor) == part.rows and tensor[0].is_contiguous() else None


class _How(NamedTuple):
    """Launch parameters of a tensor's sketch: number of programs and constexpr arguments."""

    programs: int
    constants: dict[str, object]

    @classmethod
    def of(cls, tensor: Tensor, part: Part, most: int) -> "_How":
        """Choose the launch of ``part``; aligned whole blocks use a specialization with 8-byte loads (IS_WHOLE).

        ``most`` is the maximum number of programs.
        """
        form = FORMATS[tensor.dtype]
        per_word = 64 // form.bits
        blocks = NUM_WARPS * per_word  # per iteration of a program
        is_whole = not (part.column % COUNTERS or part.num_columns % COUNTERS or tensor.data_ptr() % 8)
        is_whole = is_whole and not (part.width % per_word or part.first % per_word)
        constants: dict[str, object] = {
            "BITS": form.bits,
            "MANTISSA": form.mantissa,
            "BLOCKS": blocks,
            "IS_WHOLE": is_whole,
        }
        return cls(min(max(1, -(-part.num_blocks // blocks)), most), constants)


@triton.jit
def _mix32(h):
    """Apply the MurmurHash3 finalizer to uint32 values."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _signs(mixed, lane, shift, BITS: tl.constexpr):
    """Return two words [blocks, lanes] with the signs of a lane's elements, in the order of :func:`_elements`.

    The upper byte of each element (of each 16-bit half for BITS = 16) holds its signs in the eight groups of 32
    columns.
    """
    per_word: tl.constexpr = 64 // BITS
    low = (lane * per_word) ^ (shift & 31)  # the low five bits of the column of a lane's first element
    if BITS == 32:
        return _sign_hash(mixed, low), _sign_hash(mixed, low ^ 1)
    else:
        return (
            (_sign_hash(mixed, low ^ 1) & 0xFF000000) | ((_sign_hash(mixed, low) >> 16) & 0xFF00),
            (_sign_hash(mixed, low ^ 3) & 0xFF000000) | ((_sign_hash(mixed, low ^ 2) >> 16) & 0xFF00),
        )


@triton.jit
def _sign_hash(mixed, low):
    """Return the hash whose bits are the signs of the columns with the low five bits ``low``."""
    return _mix32(mixed ^ ((low + 1).to(tl.uint32) * 0x85EBCA77))


@triton.jit
def _elements(
    k: tl.constexpr, data, start, shift, lane, valid, first, count, BITS: tl.constexpr, IS_WHOLE: tl.constexpr
):  # fmt: skip
    """Load the elements of the counters from ``32 k + lane * 64 / BITS`` on, as two words [blocks, lanes].

    ``start`` [blocks, 1] is the offset of a block in the tensor, ``first`` its offset in the columns of the sketch.
    """
    per_word: tl.constexpr = 64 // BITS
    if IS_WHOLE:
        place = (lane + 32 // per_word * k) ^ (shift >> (per_word // 2))
        words = tl.load(data.to(tl.pointer_type(tl.uint64)) + ((start >> (per_word // 2)) + place), mask=valid, other=0)
        lower, upper = words.to(tl.uint32), (words >> 32).to(tl.uint32)
        swaps = (shift & (per_word // 2)) != 0
        if BITS == 16 and HAS_PTX:
            selectors = tl.where(swaps, 0x7654, 0x3210) ^ ((shift & 1) * 0x2222)  # for the lower word
            low, high = _permuted_bytes(lower, upper, selectors), _permuted_bytes(lower, upper, selectors ^ 0x4444)
        else:
            low, high = tl.where(swaps, upper, lower), tl.where(swaps, lower, upper)
            if BITS == 16:
                rotation = ((shift & 1) * 16).to(tl.uint32)
                low, high = (low >> rotation) | (low << rotation), (high >> rotation) | (high << rotation)
        return low, high
    else:
        element = (lane * per_word + 32 * k) ^ shift
        low = _element(data, start, element, valid, first, count)
        high = _element(data, start, element ^ (per_word // 2), valid, first, count)
        if BITS == 16:
            low |= _element(data, start, element ^ 1, valid, first, count) << 16
            high |= _element(data, start, element ^ 3, valid, first, count) << 16
        return low, high


@triton.jit
def _permuted_bytes(lower, upper, selectors):
    """Select four bytes of two words (uint32) with PRMT; the low four hex digits of ``selectors`` are byte indices."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [lower, upper, selectors], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def _element(data, start, element, valid, first, count):
    """Load the bits of one element of each block, 0 for elements outside of the sketch's columns."""
    local = first + element
    in_range = valid & (local >= 0) & (local < count)
    return tl.load(data + (start + element), mask=in_range, other=0).to(tl.uint32)


@triton.jit
def _add(
    sums, k: tl.constexpr, data, start, shift, lane, signs, valid, first, count, BITS: tl.constexpr,
    MANTISSA: tl.constexpr, IS_WHOLE: tl.constexpr, IS_CHECKED: tl.constexpr,
):  # fmt: skip
    """Accumulate the elements of the current blocks in the counters of group ``k`` (32 columns)."""
    low, high = _elements(k, data, start, shift, lane, valid, first, count, BITS, IS_WHOLE)
    sign_shift = (7 - (k ^ (shift >> 5))).to(tl.uint32)
    if BITS == 32:
        low ^= (signs[0] << sign_shift) & 0x80000000
        high ^= (signs[1] << sign_shift) & 0x80000000
        return sums[0] + _value(low, BITS, MANTISSA, IS_CHECKED), sums[1] + _value(high, BITS, MANTISSA, IS_CHECKED)
    else:
        low ^= (signs[0] << sign_shift) & 0x80008000
        high ^= (signs[1] << sign_shift) & 0x80008000
        return (
            sums[0] + _value(low & 0xFFFF, BITS, MANTISSA, IS_CHECKED),
            sums[1] + _value(low >> 16, BITS, MANTISSA, IS_CHECKED),
            sums[2] + _value(high & 0xFFFF, BITS, MANTISSA, IS_CHECKED),
            sums[3] + _value(high >> 16, BITS, MANTISSA, IS_CHECKED),
        )  # fmt: skip


@triton.jit
def _value(bits, BITS: tl.constexpr, MANTISSA: tl.constexpr, IS_CHECKED: tl.constexpr):
    """Convert the bits of an element (uint32) to float32; with IS_CHECKED, non-finite values become 0."""
    value = value_of(bits.to(tl.int32, bitcast=True), True, True, BITS, MANTISSA)
    if IS_CHECKED:
        value = tl.where(_is_finite(value), value, 0.0)
    return value


@triton.jit
def _is_finite(value):
    return tl.abs(value) < float("inf")


@triton.jit
def _zero_counters(BLOCKS: tl.constexpr, BITS: tl.constexpr):
    """Return the zero-initialized counters of one group."""
    zero = tl.zeros((BLOCKS, BITS // 2), tl.float32)
    if BITS == 32:
        return zero, zero
    else:
        return zero, zero, zero, zero


@triton.jit
def _joined_groups(one, other, BITS: tl.constexpr):
    """Join the counters of two groups as [blocks, 32, 2]."""
    return tl.join(_in_order(one, BITS), _in_order(other, BITS))


@triton.jit
def _in_order(sums, BITS: tl.constexpr):
    """Return the counters of one group in order, as [blocks, 32]."""
    if BITS == 32:
        joined = tl.join(sums[0], sums[1])
    else:
        joined = tl.join(tl.join(sums[0], sums[2]), tl.join(sums[1], sums[3]))
    return tl.reshape(joined, (joined.shape[0], 32))


@triton.jit
def _counters(
    data, row_keys, program, used, total, blocks, base, width, first, column, count, BITS: tl.constexpr,
    MANTISSA: tl.constexpr, BLOCKS: tl.constexpr, IS_WHOLE: tl.constexpr, IS_CHECKED: tl.constexpr,
):  # fmt: skip
    """Return the counters of a program's blocks as [32, 8]; counter i is at [i % 32, i // 32].

    Blocks are processed from last to first, as in ``tap._summarize_kernel``. With IS_CHECKED, non-finite elements
    count as 0.
    """
    zero = total * 0
    lane = tl.arange(0, BITS // 2)[None, :]
    s0 = _zero_counters(BLOCKS, BITS)
    s1, s2, s3, s4, s5, s6, s7 = s0, s0, s0, s0, s0, s0, s0
    blocks_per_row = tl.maximum(blocks, 1).to(tl.uint32)
    groups = (total + BLOCKS - 1) // BLOCKS
    for index in tl.range(program, groups, used):
        group = groups - 1 - index
        block_index = (zero + group) * BLOCKS + tl.arange(0, BLOCKS)
        row = (block_index.to(tl.uint32) // blocks_per_row).to(tl.int64)
        block = block_index - row * blocks
        key = tl.load(row_keys + row, mask=block_index < total, other=-1)
        valid = (key >= 0)[:, None]
        mixed = _mix32(key.to(tl.uint32) + (block + base).to(tl.uint32) * 0x9E3779B1)[:, None]
        shift = (mixed >> 24).to(tl.int32)
        signs = _signs(mixed, lane, shift, BITS)
        local = ((block + base) * 256 - column)[:, None]  # the block's offset in the columns of the sketch
        start = (row * width + first)[:, None] + local
        s0 = _add(s0, 0, data, start, shift, lane, signs, valid, local, count, BITS, MANTISSA, IS_WHOLE, IS_CHECKED)
        s1 = _add(s1, 1, data, start, shift, lane, signs, valid, local, count, BITS, MANTISSA, IS_WHOLE, IS_CHECKED)
        s2 = _add(s2, 2, data, start, shift, lane, signs, valid, local, count, BITS, MANTISSA, IS_WHOLE, IS_CHECKED)
        s3 = _add(s3, 3, data, start, shift, lane, signs, valid, local, count, BITS, MANTISSA, IS_WHOLE, IS_CHECKED)
        s4 = _add(s4, 4, data, start, shift, lane, signs, valid, local, count, BITS, MANTISSA, IS_WHOLE, IS_CHECKED)
        s5 = _add(s5, 5, data, start, shift, lane, signs, valid, local, count, BITS, MANTISSA, IS_WHOLE, IS_CHECKED)
        s6 = _add(s6, 6, data, start, shift, lane, signs, valid, local, count, BITS, MANTISSA, IS_WHOLE, IS_CHECKED)
        s7 = _add(s7, 7, data, start, shift, lane, signs, valid, local, count, BITS, MANTISSA, IS_WHOLE, IS_CHECKED)
    even = tl.join(_joined_groups(s0, s4, BITS), _joined_groups(s2, s6, BITS))
    odd = tl.join(_joined_groups(s1, s5, BITS), _joined_groups(s3, s7, BITS))
    return tl.reshape(tl.sum(tl.join(even, odd), 0), (32, 8))  # one column per group


@triton.jit
def write_partial(
    program, programs, address, rows, width, first, column, count, keys, partial, span, out, BITS: tl.constexpr,
    MANTISSA: tl.constexpr, BLOCKS: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Write the partial counters of every n-th group of blocks of a tensor that n programs share.

    ``program`` is the index of this program. The first program also writes the tensor's span: address and number of
    the partial counters, and address of the result. All arguments but the first two are int64.
    """
    if BITS == 32:
        data = address.to(tl.pointer_type(tl.uint32))
    else:
        data = address.to(tl.pointer_type(tl.uint16))
    row_keys = keys.to(tl.pointer_type(tl.int64))
    base = column // 256
    blocks = tl.where(count > 0, (column + count + 255) // 256 - base, 0)
    total = rows * blocks
    used = tl.minimum(tl.maximum((total + BLOCKS - 1) // BLOCKS, 1), programs)
    if program < used:
        counters = _counters(
            data, row_keys, program, used, total, blocks, base, width, first, column, count, BITS, MANTISSA, BLOCKS,
            IS_WHOLE, False,
        )  # fmt: skip
        if tl.sum(tl.sum(tl.where(_is_finite(counters), 0, 1), 1), 0) > 0:  # non-finite element or overflow
            counters = _counters(
                data, row_keys, program, used, total, blocks, base, width, first, column, count, BITS, MANTISSA,
                BLOCKS, IS_WHOLE, True,
            )  # fmt: skip
        target = (partial + 1024 * program).to(tl.pointer_type(tl.float32))
        tl.store(target + (tl.arange(0, 32)[:, None] + 32 * tl.arange(0, 8)[None, :]), counters)
        if program == 0:
            place = span.to(tl.pointer_type(tl.int64))
            tl.store(place, partial)
            tl.store(place + 1, used.to(tl.int64))
            tl.store(place + 2, out)


@triton.jit(
    do_not_specialize=[
        "address", "rows", "width", "first", "column", "count", "keys", "partial", "span", "out"
    ]
)  # fmt: skip
def _sketch_kernel(
    address, rows, width, first, column, count, keys, partial, span, out, BITS: tl.constexpr, MANTISSA: tl.constexpr,
    BLOCKS: tl.constexpr, IS_WHOLE: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Write the partial counters of one tensor."""
    wait_then_let_next(IS_OVERLAPPED)  # the next kernel may summarize the same tensor, see tap.begin()
    program = tl.program_id(0)
    zero = program.to(tl.int64) * 0
    write_partial(
        program, tl.num_programs(0), zero + address, zero + rows, zero + width, zero + first, zero + column,
        zero + count, zero + keys, zero + partial, zero + span, zero + out, BITS, MANTISSA, BLOCKS, IS_WHOLE,
    )  # fmt: skip


@triton.jit
def _merge_kernel(spans, TILE: tl.constexpr):
    """Sum the partial counters of one tensor in program order and store its sketch."""
    span = spans + 4 * tl.program_id(0)
    partial, count, out = tl.load(span).to(tl.pointer_type(tl.float32)), tl.load(span + 1), tl.load(span + 2)
    counter = tl.arange(0, 256)[None, :]
    if count > 0:
        total = tl.zeros((256,), tl.float64)
        for first in tl.range(0, count.to(tl.int32), TILE):
            number = first + tl.arange(0, TILE)[:, None]
            tile = tl.load(partial + number * 256 + counter, mask=number < count, other=0.0)
            total += tl.sum(tile.to(tl.float64), 0)
        tl.store(out.to(tl.pointer_type(tl.float32)) + tl.arange(0, 256), total.to(tl.float32))
        tl.store(span + 1, count * 0)


_launch_sketch, _launch_merge = Launcher(_sketch_kernel, overlaps=True), Launcher(_merge_kernel)
