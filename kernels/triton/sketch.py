"""The counters of sketches on the device; the hash and the plain reference are in kernels/native/sketch.py.

Counters need no scatter: within a block of 256 columns the place of an element is its column XOR a number that all of
the block share. So a thread keeps the same 16 or 32 counters: words of 8 bytes that are 32 columns apart, for which it
loads those words that have the elements, and puts these in order. Elements that are 32 columns apart have one hash, of
which each takes its sign from another bit.

Programs share a tensor and each writes partial counters; :meth:`Sketches.merge` adds up those of all tensors in one
launch, in a fixed order. Sums are taken in float32 within a program and in float64 across.
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
"""As :data:`tapscope.run_format.sketch.COUNTERS`."""
TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The types that are served."""
PADDING = -1
"""Key of a row that no sketch contains."""
NUM_WARPS = 4
"""Of a program that adds elements."""
PROGRAM_BYTES = NUM_WARPS * 8 * COUNTERS
"""Of whole blocks, that a program adds at a time."""
_PROGRAMS_PER_SM = 4
_SPAN = 4  # words that say where the partial counters of a tensor are: address, how many, address of the sum, unused
_TILE = 128  # partial counters that the merge loads at a time
_MERGE_WARPS = 16


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
    def num_blocks(self) -> int:
        """Blocks of 256 columns of the whole tensor in which it has elements."""
        end = self.column + self.num_columns
        each = -(-end // COUNTERS) - self.column // COUNTERS if self.num_columns else 0
        return self.rows * each


class Sketches:
    """Sketches of up to ``capacity`` tensors of one stream, complete after :meth:`merge`."""

    def __init__(self, device: torch.device, capacity: int, room: int | None = None) -> None:
        """``room``: partial counters of 1 KiB between two merges, those of 40 large tensors if not given (21 MB)."""
        self.capacity = capacity
        """Tensors between two merges at most."""
        self.most = most_programs(device)
        """Programs that share a tensor at most."""
        self._room = 40 * self.most if room is None else room
        self._partial = torch.empty(self._room, COUNTERS, device=device)
        self._spans = torch.zeros(capacity, _SPAN, dtype=torch.int64, device=device)
        self._used = 0

    @property
    def has_room(self) -> bool:
        """Whether a tensor of any size fits in before the next merge."""
        return self._used + self.most <= self._room

    @property
    def place(self) -> tuple[int, int, int]:
        """Where kernels that are launched elsewhere write to: addresses of room for partial counters, and of what says
        where these are, and how many fit in."""
        return self._partial.data_ptr(), self._spans.data_ptr(), self._room

    def add(self, tensor: Tensor, keys: Tensor, part: Part, index: int, out: int) -> None:
        """Begin the sketch of ``tensor``, each of whose rows is contiguous: number ``index`` between two merges.

        ``keys`` [rows] int64: the row keys (32 bits), or :data:`PADDING`. The counters, [256] float32, come to the
        address ``out``. Raises UsageError for other tensors, and for a type that is not in :data:`TYPES`.
        """
        how, args = self.take(tensor, keys, part, index, out)
        _launch_sketch(tensor.device, (how.programs, 1, 1), args, how.constants, num_warps=NUM_WARPS)

    def take(self, tensor: Tensor, keys: Tensor, part: Part, index: int, out: int) -> "tuple[_How, tuple[int, ...]]":
        """As :meth:`add`, but the caller launches: how, and the arguments of :func:`write_partial` are returned."""
        step = _row_step(tensor, part)
        if tensor.dtype not in TYPES or step is None:
            raise UsageError(f"no sketch of {tensor.dtype} {list(tensor.shape)}: expected floats in contiguous rows")
        part = part._replace(width=step)
        how = _How.of(tensor, part, self.most)
        span = self._spans.data_ptr() + 8 * _SPAN * index
        partial = self._partial.data_ptr() + 4 * COUNTERS * self._used
        self._used += how.programs
        return how, (tensor.data_ptr(), *part, keys.data_ptr(), partial, span, out)

    def merge(self, count: int) -> None:
        """Complete the first ``count`` sketches; the next ones are numbered from 0."""
        self._used = 0
        if count:
            _launch_merge(self._partial.device, (count, 1, 1), (self._spans,), {"TILE": _TILE}, num_warps=_MERGE_WARPS)


def most_programs(device: torch.device) -> int:
    """Programs that share a tensor at most."""
    return _PROGRAMS_PER_SM * num_sms(device)


def sketch_launch(tensor: Tensor, part: Part, slot: int) -> DriverLaunch | None:
    """How the driver launches the kernel for contiguous tensors like this one, at multiples of 16 bytes.

    Parameters are those of :func:`_sketch_kernel` before its constants, and two null pointers. ``slot`` is the place of
    the first key in memory that begins at a multiple of 16 bytes. None unless :meth:`Sketches.add` took such a tensor.
    """
    if tensor.dtype not in TYPES or not tensor.is_contiguous() or tensor.data_ptr() % 16 or is_interpreted():
        return None
    how = _How.of(tensor, part, most_programs(tensor.device))
    like = 1 << 40  # as all addresses but perhaps that of the keys
    args = tensor.data_ptr(), *part, like + 8 * (slot % 2), like, like, like
    direct = _launch_sketch.direct(tensor.device, args, how.constants, num_warps=NUM_WARPS)
    if direct is None or direct.places != tuple(range(len(args))):
        return None
    return DriverLaunch(direct.function, how.programs, direct.threads, direct.shared, direct.overlaps)


def sketch(values: Tensor, keys: Tensor, column: int = 0) -> Tensor:
    """[256] float32: the counters of ``values`` [rows, columns], whose first column is ``column`` of the whole tensor.

    ``keys`` [rows] int64: the row keys, or :data:`PADDING`. Raises UsageError for other types and shapes.
    """
    check_same_device(values, keys)
    if values.ndim != 2:
        raise UsageError(f"values are {values.dtype} {list(values.shape)}: expected floats [rows, columns]")
    rows, width = values.shape
    if keys.shape != (rows,) or keys.dtype != torch.int64:
        raise UsageError(f"keys are {keys.dtype} {list(keys.shape)}: expected int64 [{rows}]")
    found = torch.zeros(COUNTERS, device=values.device)
    sketches = Sketches(values.device, 1, most_programs(values.device))
    sketches.add(values, keys, Part(rows, width, 0, column, width), 0, found.data_ptr())
    sketches.merge(1)
    return found


def _row_step(tensor: Tensor, part: Part) -> int | None:
    """Elements between the starts of two rows; None where a row is not contiguous."""
    if tensor.is_contiguous():
        return part.width
    return tensor.stride(0) if len(tensor) == part.rows and tensor[0].is_contiguous() else None


class _How(NamedTuple):
    """How a tensor's sketch is launched."""

    programs: int
    constants: dict[str, object]

    @classmethod
    def of(cls, tensor: Tensor, part: Part, most: int) -> "_How":
        """Whole blocks, whose elements are loaded by words of 8 bytes, are a kernel of their own."""
        form = FORMATS[tensor.dtype]
        per_word = 64 // form.bits
        blocks = NUM_WARPS * per_word  # that a program adds at a time
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
    """The finaliser of MurmurHash3, of uint32 values."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _signs(mixed, lane, shift, BITS: tl.constexpr):
    """Two words [blocks, lanes] with the signs of a lane's elements, as :func:`_elements` has these.

    Of each element, or of each of the two in a word, the upper byte holds the signs in the eight groups of 32 columns.
    """
    per: tl.constexpr = 64 // BITS
    low = (lane * per) ^ (shift & 31)  # the last five bits of a lane's first element
    if BITS == 32:
        return _word(mixed, low), _word(mixed, low ^ 1)
    else:
        return (
            (_word(mixed, low ^ 1) & 0xFF000000) | ((_word(mixed, low) >> 16) & 0xFF00),
            (_word(mixed, low ^ 3) & 0xFF000000) | ((_word(mixed, low ^ 2) >> 16) & 0xFF00),
        )


@triton.jit
def _word(mixed, low):
    """The hash whose bits are the signs of the columns that have the last five bits ``low``."""
    return _mix32(mixed ^ ((low + 1).to(tl.uint32) * 0x85EBCA77))


@triton.jit
def _elements(
    k: tl.constexpr, data, start, shift, lane, there, first, count, BITS: tl.constexpr, IS_WHOLE: tl.constexpr
):  # fmt: skip
    """The elements of the counters ``32 k + lane * 64 / BITS`` and following, as two words [blocks, lanes].

    ``start`` [blocks, 1] is where a block begins in the tensor, ``first`` in the columns of the sketch.
    """
    per: tl.constexpr = 64 // BITS
    if IS_WHOLE:
        place = (lane + 32 // per * k) ^ (shift >> (per // 2))
        words = tl.load(data.to(tl.pointer_type(tl.uint64)) + ((start >> (per // 2)) + place), mask=there, other=0)
        lower, upper = words.to(tl.uint32), (words >> 32).to(tl.uint32)
        swaps = (shift & (per // 2)) != 0
        if BITS == 16 and HAS_PTX:
            places = tl.where(swaps, 0x7654, 0x3210) ^ ((shift & 1) * 0x2222)  # of the bytes of the lower word
            low, high = _chosen(lower, upper, places), _chosen(lower, upper, places ^ 0x4444)
        else:
            low, high = tl.where(swaps, upper, lower), tl.where(swaps, lower, upper)
            if BITS == 16:
                turn = ((shift & 1) * 16).to(tl.uint32)
                low, high = (low >> turn) | (low << turn), (high >> turn) | (high << turn)
        return low, high
    else:
        element = (lane * per + 32 * k) ^ shift
        low = _element(data, start, element, there, first, count)
        high = _element(data, start, element ^ (per // 2), there, first, count)
        if BITS == 16:
            low |= _element(data, start, element ^ 1, there, first, count) << 16
            high |= _element(data, start, element ^ 3, there, first, count) << 16
        return low, high


@triton.jit
def _chosen(lower, upper, places):
    """The bytes at four places of two words (uint32), one place in each lower hexadecimal digit of ``places``."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [lower, upper, places], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def _element(data, start, element, there, first, count):
    """The bits of an element of each block, where it is one of the sketch."""
    local = first + element
    inside = there & (local >= 0) & (local < count)
    return tl.load(data + (start + element), mask=inside, other=0).to(tl.uint32)


@triton.jit
def _add(
    sums, k: tl.constexpr, data, start, shift, lane, signs, there, first, count, BITS: tl.constexpr,
    MANTISSA: tl.constexpr, IS_WHOLE: tl.constexpr, IS_CHECKED: tl.constexpr,
):  # fmt: skip
    """The counters of group ``k`` with the elements of some blocks that belong to them."""
    low, high = _elements(k, data, start, shift, lane, there, first, count, BITS, IS_WHOLE)
    up = (7 - (k ^ (shift >> 5))).to(tl.uint32)
    if BITS == 32:
        low ^= (signs[0] << up) & 0x80000000
        high ^= (signs[1] << up) & 0x80000000
        return sums[0] + _value(low, BITS, MANTISSA, IS_CHECKED), sums[1] + _value(high, BITS, MANTISSA, IS_CHECKED)
    else:
        low ^= (signs[0] << up) & 0x80008000
        high ^= (signs[1] << up) & 0x80008000
        return (
            sums[0] + _value(low & 0xFFFF, BITS, MANTISSA, IS_CHECKED),
            sums[1] + _value(low >> 16, BITS, MANTISSA, IS_CHECKED),
            sums[2] + _value(high & 0xFFFF, BITS, MANTISSA, IS_CHECKED),
            sums[3] + _value(high >> 16, BITS, MANTISSA, IS_CHECKED),
        )  # fmt: skip


@triton.jit
def _value(bits, BITS: tl.constexpr, MANTISSA: tl.constexpr, IS_CHECKED: tl.constexpr):
    """What the bits of an element (uint32) mean; 0 where that is not finite, if it is checked."""
    value = value_of(bits.to(tl.int32, bitcast=True), True, True, BITS, MANTISSA)
    if IS_CHECKED:
        value = tl.where(_is_finite(value), value, 0.0)
    return value


@triton.jit
def _is_finite(value):
    return tl.abs(value) < float("inf")


@triton.jit
def _no_counters(BLOCKS: tl.constexpr, BITS: tl.constexpr):
    """The counters of one group, of no elements."""
    zero = tl.zeros((BLOCKS, BITS // 2), tl.float32)
    if BITS == 32:
        return zero, zero
    else:
        return zero, zero, zero, zero


@triton.jit
def _two(one, other, BITS: tl.constexpr):
    """The counters of two groups as [blocks, 32, 2]."""
    return tl.join(_in_order(one, BITS), _in_order(other, BITS))


@triton.jit
def _in_order(sums, BITS: tl.constexpr):
    """The counters of one group as [blocks, 32]."""
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
    """[32, 8]: the counters of a program's blocks; counter i is at [i % 32, i // 32].

    The last blocks come first, as in ``tap._summarize_kernel``. Elements that are not finite count as 0 if they are
    checked.
    """
    wide = total * 0
    lane = tl.arange(0, BITS // 2)[None, :]
    s0 = _no_counters(BLOCKS, BITS)
    s1, s2, s3, s4, s5, s6, s7 = s0, s0, s0, s0, s0, s0, s0
    narrow = tl.maximum(blocks, 1).to(tl.uint32)
    groups = (total + BLOCKS - 1) // BLOCKS
    for index in tl.range(program, groups, used):
        group = groups - 1 - index
        unit = (wide + group) * BLOCKS + tl.arange(0, BLOCKS)
        row = (unit.to(tl.uint32) // narrow).to(tl.int64)
        block = unit - row * blocks
        key = tl.load(row_keys + row, mask=unit < total, other=-1)
        there = (key >= 0)[:, None]
        mixed = _mix32(key.to(tl.uint32) + (block + base).to(tl.uint32) * 0x9E3779B1)[:, None]
        shift = (mixed >> 24).to(tl.int32)
        signs = _signs(mixed, lane, shift, BITS)
        local = ((block + base) * 256 - column)[:, None]  # column of the sketch where the block begins
        start = (row * width + first)[:, None] + local
        s0 = _add(s0, 0, data, start, shift, lane, signs, there, local, count, BITS, MANTISSA, IS_WHOLE, IS_CHECKED)
        s1 = _add(s1, 1, data, start, shift, lane, signs, there, local, count, BITS, MANTISSA, IS_WHOLE, IS_CHECKED)
        s2 = _add(s2, 2, data, start, shift, lane, signs, there, local, count, BITS, MANTISSA, IS_WHOLE, IS_CHECKED)
        s3 = _add(s3, 3, data, start, shift, lane, signs, there, local, count, BITS, MANTISSA, IS_WHOLE, IS_CHECKED)
        s4 = _add(s4, 4, data, start, shift, lane, signs, there, local, count, BITS, MANTISSA, IS_WHOLE, IS_CHECKED)
        s5 = _add(s5, 5, data, start, shift, lane, signs, there, local, count, BITS, MANTISSA, IS_WHOLE, IS_CHECKED)
        s6 = _add(s6, 6, data, start, shift, lane, signs, there, local, count, BITS, MANTISSA, IS_WHOLE, IS_CHECKED)
        s7 = _add(s7, 7, data, start, shift, lane, signs, there, local, count, BITS, MANTISSA, IS_WHOLE, IS_CHECKED)
    even = tl.join(_two(s0, s4, BITS), _two(s2, s6, BITS))
    odd = tl.join(_two(s1, s5, BITS), _two(s3, s7, BITS))
    return tl.reshape(tl.sum(tl.join(even, odd), 0), (32, 8))  # all groups, of which each is a column


@triton.jit
def write_partial(
    program, programs, address, rows, width, first, column, count, keys, partial, span, out, BITS: tl.constexpr,
    MANTISSA: tl.constexpr, BLOCKS: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Every n-th group of blocks of one tensor that n programs share, of which this is number ``program``. The first
    one writes where all of them leave their counters. All arguments but the first two are int64."""
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
        if tl.sum(tl.sum(tl.where(_is_finite(counters), 0, 1), 1), 0) > 0:  # an element is not, or a sum is too large
            counters = _counters(
                data, row_keys, program, used, total, blocks, base, width, first, column, count, BITS, MANTISSA,
                BLOCKS, IS_WHOLE, True,
            )  # fmt: skip
        to = (partial + 1024 * program).to(tl.pointer_type(tl.float32))
        tl.store(to + (tl.arange(0, 32)[:, None] + 32 * tl.arange(0, 8)[None, :]), counters)
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
    """The partial counters of one tensor."""
    wait_then_let_next(IS_OVERLAPPED)  # statistics of the same tensor, see tap.begin()
    program = tl.program_id(0)
    wide = program.to(tl.int64) * 0
    write_partial(
        program, tl.num_programs(0), wide + address, wide + rows, wide + width, wide + first, wide + column,
        wide + count, wide + keys, wide + partial, wide + span, wide + out, BITS, MANTISSA, BLOCKS, IS_WHOLE,
    )  # fmt: skip


@triton.jit
def _merge_kernel(spans, TILE: tl.constexpr):
    """The counters of one tensor, from the partial ones of its programs in order."""
    span = spans + 4 * tl.program_id(0)
    partial, count, out = tl.load(span).to(tl.pointer_type(tl.float32)), tl.load(span + 1), tl.load(span + 2)
    counter = tl.arange(0, 256)[None, :]
    if count > 0:
        total = tl.zeros((256,), tl.float64)
        for first in tl.range(0, count.to(tl.int32), TILE):
            number = first + tl.arange(0, TILE)[:, None]
            some = tl.load(partial + number * 256 + counter, mask=number < count, other=0.0)
            total += tl.sum(some.to(tl.float64), 0)
        tl.store(out.to(tl.pointer_type(tl.float32)) + tl.arange(0, 256), total.to(tl.float32))
        tl.store(span + 1, count * 0)


_launch_sketch, _launch_merge = Launcher(_sketch_kernel, overlaps=True), Launcher(_merge_kernel)
