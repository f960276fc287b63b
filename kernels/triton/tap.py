"""Statistics and digests of tensors in one pass over their bytes on the device: what a tap keeps of a value.

The result of a tensor is a row of 16 64-bit words, the first 15 in the order of kernels/native/summary.h:

    count, nan, +inf, -inf, zeros, subnormals, finite     int64
    min, max, max of magnitudes, sum, sum of squares      float64, over the finite elements
    hash (two words), bag                                 defined in kernels/native/digests.py
    arrivals                                              0 before and after every launch

Counts, extremes and digests are those of the host bit for bit; sums are taken in float32 over at most 16 words of 64
bits and in float64 across, and in float64 throughout where squares would leave float32's range. A complex number counts
as two elements. Digests add up over blocks of 8 KiB whatever their order, so that programs share a tensor: each takes
every n-th block, and the last one to finish adds up the partial results in a fixed order. The same tensor gives the
same bits in every call.

Integer instructions limit the speed, not memory: about 16 per element of bfloat16 besides its share of the load. A
block without NaN, infinity, zero, subnormal numbers and squares beyond float32 takes the short way; every other one is
read again.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.launch import Launcher, check_same_device, next_power, num_sms

WIDTH = 16
"""64-bit words of a row."""
_WORDS = tl.constexpr(1024)  # of a block of the hash
_BLOCK_BYTES = 8 * 1024
_NUM_WARPS = 4
_PROGRAMS_PER_SM = 2
_STEP = tl.constexpr(0x9E3779B97F4A7C15)
_OTHER = tl.constexpr(0xD6E8FEB86659FD93)
_MASK = (1 << 64) - 1
_WIDTH = tl.constexpr(WIDTH)
_PARTS = tl.constexpr(12)  # words of a program's partial result


class Format(NamedTuple):
    """What the bits of an element mean; magnitudes are bits without the sign."""

    kind: str
    """``float``, ``signed`` or ``unsigned``."""
    bits: int
    mantissa: int = 0
    infinity: int = -1
    """Magnitude of infinity, -1 where there is none."""
    nan: int = 0
    """The least magnitude that is NaN."""


FORMATS = {
    torch.float64: Format("float", 64, 52, 0x7FF << 52, (0x7FF << 52) + 1),
    torch.float32: Format("float", 32, 23, 0x7F800000, 0x7F800001),
    torch.float16: Format("float", 16, 10, 0x7C00, 0x7C01),
    torch.bfloat16: Format("float", 16, 7, 0x7F80, 0x7F81),
    torch.float8_e5m2: Format("float", 8, 2, 0x7C, 0x7D),
    torch.float8_e4m3fn: Format("float", 8, 3, -1, 0x7F),
    torch.int64: Format("signed", 64),
    torch.int32: Format("signed", 32),
    torch.int16: Format("signed", 16),
    torch.int8: Format("signed", 8),
    torch.uint8: Format("unsigned", 8),
    torch.bool: Format("unsigned", 8),
}
"""The types that are served; complex64 and complex128 as two of their parts."""


def summarize_reference(tensor: Tensor) -> Tensor:
    """The counts and sums of :func:`summarize` in plain torch, [12] float64: a row without its digests.

    The digests' reference is kernels/native/digests.py.
    """
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()
    wide = flat.double()
    finite = wide[wide.isfinite()]
    form = FORMATS[flat.dtype]
    tiny = torch.finfo(flat.dtype).smallest_normal if form.kind == "float" else 0.0
    counts = [len(wide), wide.isnan().sum(), (wide == torch.inf).sum(), (wide == -torch.inf).sum()]
    counts += [(wide == 0).sum(), ((finite != 0) & (finite.abs() < tiny)).sum(), len(finite)]
    low, high = (finite.min() + 0.0, finite.max() + 0.0) if len(finite) else (torch.inf, -torch.inf)
    most = finite.abs().max() if len(finite) else 0.0
    return torch.tensor([*counts, low, high, most, finite.sum() + 0.0, finite.square().sum()], dtype=torch.float64)


def summarize(tensor: Tensor, row: Tensor | None = None) -> Tensor:
    """The row of ``tensor``: [16] int64 on its device, into ``row`` where it is given, whose last word must be 0.

    A tensor that is not contiguous, or does not begin at a multiple of 16 bytes, is copied first. Nothing is read on
    the host, so that a CUDA graph may capture it. Raises UsageError for a type that is not in :data:`FORMATS`.
    """
    flat = _flat(tensor)
    check_same_device(flat, row)
    result = torch.zeros(WIDTH, dtype=torch.int64, device=flat.device) if row is None else row
    if result.shape != (WIDTH,) or result.dtype != torch.int64 or not result.is_contiguous():
        raise UsageError(f"row is {result.dtype} {list(result.shape)}; contiguous int64 [{WIDTH}] is needed")
    programs = _programs(flat.numel() * flat.element_size(), num_sms(flat.device))
    _run(flat.data_ptr(), flat.numel(), None, flat.dtype, programs, result.view(1, WIDTH))
    return result


def summarize_many(table: Tensor, dtype: torch.dtype, max_bytes: int, rows: Tensor) -> None:
    """The rows [tensors, 16] int64 of tensors of one type at addresses that are read on the device, in one launch.

    ``table`` [tensors, 2] int64 on the device holds each tensor's address, a multiple of 16, and its number of elements
    (of a complex tensor twice as many). ``max_bytes`` is the size of the largest tensor, or an upper bound of it. The
    table may be filled after a CUDA graph has captured the call, and the tensors must be contiguous and alive when it
    runs. The last word of every row must be 0. Raises UsageError for invalid arguments.
    """
    check_same_device(table, rows)
    if dtype not in FORMATS:
        raise UsageError(f"no statistics of {dtype} on the device")
    if table.shape != (len(rows), 2) or rows.shape[1:] != (WIDTH,) or {table.dtype, rows.dtype} != {torch.int64}:
        shapes = f"table {list(table.shape)} and rows {list(rows.shape)}"
        raise UsageError(f"{shapes}: int64 [n, 2] and [n, {WIDTH}] are needed")
    if not table.is_contiguous() or not rows.is_contiguous():
        raise UsageError("table and rows must be contiguous")
    if len(rows):
        _run(0, 0, table, dtype, _programs(max_bytes, num_sms(rows.device)), rows)


def table_of(tensors: Sequence[Tensor]) -> Tensor:
    """The table of :func:`summarize_many` for ``tensors``, on the CPU.

    Raises UsageError for a tensor that is not contiguous and aligned to 16 bytes.
    """
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise UsageError("a tensor in the table must be contiguous and aligned to 16 bytes")
    counts = [tensor.numel() * (2 if tensor.is_complex() else 1) for tensor in tensors]
    rows = [[tensor.data_ptr(), count] for tensor, count in zip(tensors, counts, strict=True)]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 2)


def flattened(tensor: Tensor) -> tuple[Tensor, int]:
    """``tensor`` as its real elements, in order and aligned, for the table of :func:`summarize_many`; and their number.

    A tensor that lies so already is given as it is. Raises UsageError for a type that is not in :data:`FORMATS`.
    """
    flat = _flat(tensor)
    return flat, flat.numel()


def prepare(device: torch.device) -> None:
    """Make what the kernels need on ``device``, which a CUDA graph cannot capture: before a capture."""
    _keys(device)
    num_sms(device)


def _flat(tensor: Tensor) -> Tensor:
    """``tensor`` as its real elements, in order and aligned."""
    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    if flat.dtype not in FORMATS:
        raise UsageError(f"no statistics of {tensor.dtype} on the device")
    flat = flat.contiguous()
    return flat.clone() if flat.data_ptr() % 16 else flat


def _programs(nbytes: int, sms: int) -> int:
    """How many share a tensor: one for each block, as long as all of them run together."""
    return max(1, min(-(-nbytes // _BLOCK_BYTES), _PROGRAMS_PER_SM * sms))


def _run(
    address: int, count: int, table: Tensor | None, dtype: torch.dtype, programs: int, rows: Tensor
) -> None:  # fmt: skip
    """Launch the kernel for every row."""
    partial = rows
    if programs > 1:
        partial = torch.empty(len(rows), programs, 12, dtype=torch.int64, device=rows.device)
    args = address, count, table, _keys(rows.device), partial, rows
    constants = _constants(dtype, programs)
    _launch_summarize(rows.device, (programs, len(rows), 1), args, constants, num_warps=_NUM_WARPS)


@functools.lru_cache(maxsize=256)
def _constants(dtype: torch.dtype, programs: int) -> dict[str, Any]:
    """Constants of the kernel."""
    form = FORMATS[dtype]
    return {
        "IS_FLOAT": form.kind == "float", "IS_SIGNED": form.kind == "signed", "BITS": form.bits,
        "MANTISSA": form.mantissa, "INFINITY": form.infinity, "NAN": form.nan,
        "LANES": 64 * _NUM_WARPS, "BLOCK": 1 if programs == 1 else max(32, next_power(programs)),
    }  # fmt: skip


@functools.lru_cache(maxsize=16)
def _keys(device: torch.device) -> Tensor:
    """The key of the hash, [1032] int64."""
    return torch.tensor([_signed(_mixed_int((j + 1) * 0x9E3779B97F4A7C15)) for j in range(1032)], device=device)


def _mixed_int(value: int) -> int:
    """mix64 of kernels/native/digests.py."""
    value &= _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


@triton.jit
def _mixed(z):
    """mix64 of uint64 values, the finaliser of splitmix64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _product(word, key):
    """The hash's product of two halves, each of 32 bits."""
    low = (word.to(tl.uint32) + key.to(tl.uint32)).to(tl.uint64)
    return low * ((word >> 32).to(tl.uint32) + (key >> 32).to(tl.uint32)).to(tl.uint64)


@triton.jit
def _value(bits, IS_FLOAT: tl.constexpr, IS_SIGNED: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """What an element's bits (int32, or int64) mean, in float32 where that holds every value, else in float64."""
    if IS_FLOAT:
        if BITS == 64:
            return bits.to(tl.float64, bitcast=True)
        elif BITS == 32:
            return bits.to(tl.float32, bitcast=True)
        elif MANTISSA == 7:
            return (bits << 16).to(tl.float32, bitcast=True)
        elif BITS == 16:
            return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        elif MANTISSA == 2:  # float16 without its last byte
            return (bits << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        else:  # float8_e4m3fn: exponents of float32 are 120 more
            magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
            return tl.where(bits >= 128, -magnitude, magnitude)
    elif IS_SIGNED and BITS < 32:
        half: tl.constexpr = 1 << (BITS - 1)
        return ((bits ^ half) - half).to(tl.float64)
    else:
        return bits.to(tl.float64)


@triton.jit
def _item(bits, BITS: tl.constexpr):
    """An element's number in the bag, less the constant that every one of 16 bits and more has."""
    if BITS == 8:
        return _mixed((bits.to(tl.uint64) + 1) * _STEP)
    elif BITS == 16:
        z = (bits * 0x9E3B) & 0xFFFF
        return _pieces((z ^ (z >> 5)).to(tl.uint64), 1)
    elif BITS == 32:
        z = bits.to(tl.uint32, bitcast=True) * 0x9E3779B1
        return _pieces((z ^ (z >> 7)).to(tl.uint64), 2)
    else:
        z = bits.to(tl.uint64, bitcast=True) * _STEP
        return _pieces(z ^ (z >> 7), 4)


@triton.jit
def _pieces(z, COUNT: tl.constexpr):
    """The sum of s + 2^32 s^2 over the pieces of 16 bits of ``z``, read as signed."""
    total = tl.zeros_like(z)
    for k in tl.static_range(COUNT):
        s = ((z >> (16 * k)) & 0xFFFF).to(tl.int32)
        s = (s ^ 0x8000) - 0x8000
        total += s.to(tl.int64).to(tl.uint64, bitcast=True) + ((s * s).to(tl.uint64) << 32)
    return total


@triton.jit
def _bits(words, k: tl.constexpr, BITS: tl.constexpr):
    """Element ``k`` of each word (uint64), as int32 or, of 64 bits, int64."""
    if BITS == 64:
        return words.to(tl.int64, bitcast=True)
    elif BITS == 32:
        return (words >> (32 * k)).to(tl.uint32).to(tl.int32, bitcast=True)
    else:
        return ((words >> (BITS * k)) & ((1 << BITS) - 1)).to(tl.int32)


@triton.jit
def _finite(
    bits, real, IS_FLOAT: tl.constexpr, BITS: tl.constexpr, INFINITY: tl.constexpr, NAN: tl.constexpr
):  # fmt: skip
    """(which elements are there and finite, magnitudes)."""
    sign: tl.constexpr = (1 << (BITS - 1)) - 1
    magnitude = bits & sign
    if IS_FLOAT:
        return real & (magnitude < NAN) & (magnitude != INFINITY), magnitude
    else:
        return real, bits


@triton.jit
def _sixteen(half, upper: tl.constexpr, MANTISSA: tl.constexpr):
    """(value, piece of the bag) of one of the two elements of 16 bits in ``half`` (uint32)."""
    if upper:
        spread = (half & 0xFFFF0000) * 0x9E3B
        if MANTISSA == 7:
            value = (half & 0xFFFF0000).to(tl.float32, bitcast=True)
        else:
            value = (half >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        spread = half * 0x9E3B0000  # the lower element's product, moved to the upper half
        if MANTISSA == 7:
            value = (half << 16).to(tl.float32, bitcast=True)
        else:
            value = half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return value, (spread ^ (spread >> 5)).to(tl.int32, bitcast=True) >> 16


@triton.jit
def _gather(sums, value, piece, other):
    """Sums and extremes of the elements so far with one more, which has one or two pieces in the bag."""
    total, squares, low, high, least, pieces, piece_squares = sums
    magnitude = tl.abs(value)
    pieces += piece
    piece_squares += piece * piece
    if other is not None:
        pieces += other
        piece_squares += other * other
    return (
        total + value, squares + value * value, tl.minimum(low, value), tl.maximum(high, value),
        tl.minimum(least, magnitude), pieces, piece_squares,
    )  # fmt: skip


@triton.jit
def _ordinary(words, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """Of a block [depth, lanes] of ordinary floats, for each lane: sum, sum of squares, min, max, least magnitude, bag.

    In float32, which holds every value; the caller checks that nothing has left its range.
    """
    zero = tl.zeros_like(words).to(tl.float32)
    none = tl.zeros_like(words).to(tl.int32)
    sums = zero, zero, zero + float("inf"), zero - float("inf"), zero + float("inf"), none, none
    for k in tl.static_range(2):
        half = (words >> (32 * k)).to(tl.uint32)
        if BITS == 16:
            value, piece = _sixteen(half, False, MANTISSA)
            sums = _gather(sums, value, piece, None)
            value, piece = _sixteen(half, True, MANTISSA)
            sums = _gather(sums, value, piece, None)
        else:
            spread = half * 0x9E3779B1
            spread = (spread ^ (spread >> 7)).to(tl.int32, bitcast=True)
            sums = _gather(sums, half.to(tl.float32, bitcast=True), spread >> 16, (spread << 16) >> 16)
    total, squares, low, high, least, pieces, piece_squares = sums
    bag = tl.sum(pieces, 0).to(tl.int64).to(tl.uint64, bitcast=True)
    bag += tl.sum(piece_squares, 0).to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    return tl.sum(total, 0), tl.sum(squares, 0), tl.min(low, 0), tl.max(high, 0), tl.min(least, 0), bag


@triton.jit
def _small(words, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """(zeros, subnormals) of each lane of a block of ordinary floats."""
    zeros = tl.zeros_like(words).to(tl.int32)
    tiny = zeros
    for k in tl.static_range(64 // BITS):
        magnitude = _bits(words, k, BITS) & ((1 << (BITS - 1)) - 1)
        zeros += (magnitude == 0).to(tl.int32)
        tiny += (magnitude < (1 << MANTISSA)).to(tl.int32)
    zeros = tl.sum(zeros, 0)
    return zeros, tl.sum(tiny, 0) - zeros


@triton.jit
def _trimmed(words, index, nbytes):
    """Words without what follows the last byte."""
    left = tl.minimum(tl.maximum(nbytes - 8 * index, 1), 8)
    return words & (0xFFFFFFFFFFFFFFFF >> (64 - 8 * left).to(tl.uint64))


@triton.jit
def _any(
    words, first, count, IS_FLOAT: tl.constexpr, IS_SIGNED: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr,
    INFINITY: tl.constexpr, NAN: tl.constexpr,
):  # fmt: skip
    """Of words [lanes] of any elements, for each lane: nan, +inf, -inf, zeros, subnormals, sum, sum of squares, min,
    max, bag. Sums are taken in float64."""
    nan = tl.zeros_like(words).to(tl.int32)
    posinf, neginf, zeros, tiny = nan, nan, nan, nan
    bag = tl.zeros_like(words)
    total = tl.zeros_like(words).to(tl.float64)
    squares = total
    low, high = total + float("inf"), total - float("inf")
    for k in tl.static_range(64 // BITS):
        bits, real = _bits(words, k, BITS), first + k < count
        usable, magnitude = _finite(bits, real, IS_FLOAT, BITS, INFINITY, NAN)
        zeros += (real & (magnitude == 0)).to(tl.int32)
        if IS_FLOAT:
            nan += (real & (magnitude >= NAN)).to(tl.int32)
            infinite = real & (magnitude == INFINITY)
            posinf += (infinite & (bits == magnitude)).to(tl.int32)
            neginf += (infinite & (bits != magnitude)).to(tl.int32)
            tiny += (real & (magnitude > 0) & (magnitude < (1 << MANTISSA))).to(tl.int32)
        value = _value(bits, IS_FLOAT, IS_SIGNED, BITS, MANTISSA).to(tl.float64)
        low = tl.minimum(low, tl.where(usable, value, float("inf")))
        high = tl.maximum(high, tl.where(usable, value, float("-inf")))
        value = tl.where(usable, value, 0.0)
        total += value
        squares += value * value
        bag += tl.where(real, _item(bits, BITS), 0)
    return nan, posinf, neginf, zeros, tiny, total, squares, low, high, bag


@triton.jit
def _store_row(
    row, count, SIZE: tl.constexpr, nan, posinf, neginf, zeros, tiny, low, high, total, squares, one, two, bag
):  # fmt: skip
    """A finished row of elements of SIZE bytes; minus zero becomes zero."""
    nbytes = count * SIZE
    if SIZE > 1:
        bag += count.to(tl.uint64) * _STEP
    finite = count - nan - posinf - neginf
    low, high = tl.where(low == 0.0, 0.0, low), tl.where(high == 0.0, 0.0, high)
    most = tl.where(finite > 0, tl.maximum(high, -low), 0.0)
    tl.store(row, count)
    tl.store(row + 1, nan)
    tl.store(row + 2, posinf)
    tl.store(row + 3, neginf)
    tl.store(row + 4, zeros)
    tl.store(row + 5, tiny)
    tl.store(row + 6, finite)
    tl.store(row + 7, low.to(tl.int64, bitcast=True))
    tl.store(row + 8, high.to(tl.int64, bitcast=True))
    tl.store(row + 9, tl.where(most == 0.0, 0.0, most).to(tl.int64, bitcast=True))
    tl.store(row + 10, tl.where(total == 0.0, 0.0, total).to(tl.int64, bitcast=True))
    tl.store(row + 11, squares.to(tl.int64, bitcast=True))
    tl.store(row + 12, _mixed(one + nbytes.to(tl.uint64)).to(tl.int64, bitcast=True))
    tl.store(row + 13, _mixed(two + nbytes.to(tl.uint64)).to(tl.int64, bitcast=True))
    tl.store(row + 14, bag.to(tl.int64, bitcast=True))


@triton.jit
def _store_part(part, nan, posinf, neginf, zeros, tiny, low, high, total, squares, one, two, bag):
    """A partial result."""
    tl.store(part, nan)
    tl.store(part + 1, posinf)
    tl.store(part + 2, neginf)
    tl.store(part + 3, zeros)
    tl.store(part + 4, tiny)
    tl.store(part + 5, low.to(tl.int64, bitcast=True))
    tl.store(part + 6, high.to(tl.int64, bitcast=True))
    tl.store(part + 7, total.to(tl.int64, bitcast=True))
    tl.store(part + 8, squares.to(tl.int64, bitcast=True))
    tl.store(part + 9, one.to(tl.int64, bitcast=True))
    tl.store(part + 10, two.to(tl.int64, bitcast=True))
    tl.store(part + 11, bag.to(tl.int64, bitcast=True))


@triton.jit
def _part(parts, k: tl.constexpr, real):
    """One word of every program's partial result."""
    return tl.load(parts + k, mask=real, other=0, cache_modifier=".cg")


@triton.jit
def _merge(parts, programs, row, count, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The row of one tensor from the partial results of its programs, in their order."""
    program = tl.arange(0, BLOCK)
    real = program < programs
    parts += program * _PARTS
    nan = tl.sum(_part(parts, 0, real), 0)
    posinf = tl.sum(_part(parts, 1, real), 0)
    neginf = tl.sum(_part(parts, 2, real), 0)
    zeros = tl.sum(_part(parts, 3, real), 0)
    tiny = tl.sum(_part(parts, 4, real), 0)
    low = tl.min(tl.where(real, _part(parts, 5, real).to(tl.float64, bitcast=True), float("inf")), 0)
    high = tl.max(tl.where(real, _part(parts, 6, real).to(tl.float64, bitcast=True), float("-inf")), 0)
    total = tl.sum(_part(parts, 7, real).to(tl.float64, bitcast=True), 0)
    squares = tl.sum(_part(parts, 8, real).to(tl.float64, bitcast=True), 0)
    one = tl.sum(_part(parts, 9, real).to(tl.uint64, bitcast=True), 0)
    two = tl.sum(_part(parts, 10, real).to(tl.uint64, bitcast=True), 0)
    bag = tl.sum(_part(parts, 11, real).to(tl.uint64, bitcast=True), 0)
    _store_row(row, count, SIZE, nan, posinf, neginf, zeros, tiny, low, high, total, squares, one, two, bag)


@triton.jit(do_not_specialize=["address", "count"])
def _summarize_kernel(
    address, count, table, keys, partial, rows, IS_FLOAT: tl.constexpr, IS_SIGNED: tl.constexpr, BITS: tl.constexpr,
    MANTISSA: tl.constexpr, INFINITY: tl.constexpr, NAN: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every n-th block of one tensor that n programs share; the last of them writes its row. BLOCK is 1 if n is.

    Each thread has two of the LANES, and all of a block's words in them: sums stay in registers until the end.
    """
    program, tensor = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if table is not None:
        address = tl.load(table + 2 * tensor)
        count = tl.load(table + 2 * tensor + 1)
    count = count.to(tl.int64)
    nbytes = count * (BITS // 8)
    data = tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(tl.uint64)), 16)
    words = (nbytes + 7) // 8
    blocks = ((words + _WORDS - 1) // _WORDS).to(tl.int32)
    programs = tl.minimum(tl.num_programs(0), tl.maximum(blocks, 1))
    row = rows + tensor * _WIDTH
    if program < programs:
        DEPTH: tl.constexpr = _WORDS // LANES
        place = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        key_one = tl.load(keys + place).to(tl.uint64, bitcast=True)
        key_two = tl.load(keys + 8 + place).to(tl.uint64, bitcast=True)
        nan = tl.zeros([LANES], tl.int64)
        posinf, neginf, zeros, tiny = nan, nan, nan, nan
        bag = nan.to(tl.uint64, bitcast=True)
        total = tl.zeros([LANES], tl.float64)
        squares = total
        low, high = total + float("inf"), total - float("inf")
        one = (nbytes * 0).to(tl.uint64, bitcast=True)
        two = one
        for step in tl.range(program, blocks, programs, num_stages=2):
            number = nbytes * 0 + step
            index = number * _WORDS + place
            real = index < words
            read = tl.load(data + index, mask=real, other=0)
            whole = (number + 1) * (8 * _WORDS) <= nbytes
            if whole:
                one_lanes = tl.sum(_product(read, key_one), 0)
                two_lanes = tl.sum(_product(read, key_two), 0)
            else:
                read = _trimmed(read, index, nbytes)
                one_lanes = tl.sum(tl.where(real, _product(read, key_one), 0), 0)
                two_lanes = tl.sum(tl.where(real, _product(read, key_two), 0), 0)
            one += _mixed(tl.sum(one_lanes, 0) + (number + 1).to(tl.uint64) * _STEP)
            two += _mixed(tl.sum(two_lanes, 0) + (number + 1).to(tl.uint64) * _OTHER)
            is_done = False
            if IS_FLOAT and (BITS == 32 or BITS == 16):
                if whole:
                    added, added_squares, least, most, nearest, items = _ordinary(read, BITS, MANTISSA)
                    fits = (added_squares < 1e30) & ((added_squares > 1e-24) | ((least == 0.0) & (most == 0.0)))
                    smallest: tl.constexpr = 6.103515625e-05 if MANTISSA == 10 else 1.1754943508222875e-38
                    flags = tl.sum(tl.where(fits, 0, 65536) + tl.where(nearest < smallest, 1, 0), 0)
                    is_done = flags < 65536
                    if is_done:
                        total += added.to(tl.float64)
                        squares += added_squares.to(tl.float64)
                        low = tl.minimum(low, least.to(tl.float64))
                        high = tl.maximum(high, most.to(tl.float64))
                        bag += items
                        if flags != 0:
                            few_zeros, few_tiny = _small(read, BITS, MANTISSA)
                            zeros += few_zeros
                            tiny += few_tiny
            if not is_done:
                for depth in range(DEPTH):  # few registers: the words are read again
                    at = number * _WORDS + depth * LANES + tl.arange(0, LANES)
                    again = _trimmed(tl.load(data + at, mask=at < words, other=0), at, nbytes)
                    (
                        few_nan, few_posinf, few_neginf, few_zeros, few_tiny, added, added_squares, least, most, items
                    ) = _any(
                        again, at * (64 // BITS), count, IS_FLOAT, IS_SIGNED, BITS, MANTISSA, INFINITY, NAN
                    )  # fmt: skip
                    nan += few_nan
                    posinf += few_posinf
                    neginf += few_neginf
                    zeros += few_zeros
                    tiny += few_tiny
                    total += added
                    squares += added_squares
                    low = tl.minimum(low, least)
                    high = tl.maximum(high, most)
                    bag += items
        few_nan, few_posinf, few_neginf = tl.sum(nan, 0), tl.sum(posinf, 0), tl.sum(neginf, 0)
        few_zeros, few_tiny = tl.sum(zeros, 0), tl.sum(tiny, 0)
        least, most = tl.min(low, 0), tl.max(high, 0)
        added, added_squares, items = tl.sum(total, 0), tl.sum(squares, 0), tl.sum(bag, 0)
        if BLOCK == 1:
            _store_row(
                row, count, BITS // 8, few_nan, few_posinf, few_neginf, few_zeros, few_tiny, least, most, added,
                added_squares, one, two, items,
            )  # fmt: skip
        else:
            parts = partial + tensor * tl.num_programs(0) * _PARTS
            _store_part(
                parts + program * _PARTS, few_nan, few_posinf, few_neginf, few_zeros, few_tiny, least, most, added,
                added_squares, one, two, items,
            )  # fmt: skip
            tl.debug_barrier()  # the partial result is complete before it counts as arrived
            arrived = tl.atomic_add(row + 15, 1, sem="acq_rel")
            if arrived == programs - 1:
                _merge(parts, programs, row, count, BITS // 8, BLOCK)
                tl.store(row + 15, nbytes * 0)


_launch_summarize = Launcher(_summarize_kernel)
