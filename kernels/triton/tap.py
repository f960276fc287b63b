"""Statistics and digests of tensors in one pass over their bytes on the device: what a tap keeps of a value.

The result of a tensor is a row of 15 64-bit words in the order of kernels/native/summary.h:

    count, nan, +inf, -inf, zeros, subnormals, finite     int64
    min, max, max of magnitudes, sum, sum of squares      float64, over the finite elements
    hash (two words), bag                                 defined in kernels/native/digests.py

Counts, extremes and digests are those of the host bit for bit; sums are taken in float32 within a block of 8 KiB and
in float64 across, and in float64 throughout where squares would leave float32's range. A complex number counts as two
elements. Digests add up over blocks of 8 KiB whatever their order, so that programs share a tensor: each takes every
n-th tile, and where there are several a second kernel adds them up in a fixed order. The same tensor gives the same
bits in every call.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.launch import Launcher, check_same_device, next_power, num_sms

WIDTH = 15
"""64-bit words of a row."""
_WORDS = tl.constexpr(1024)  # of a block of the hash
_ROWS = tl.constexpr(1)  # blocks of a tile
_TILE_BYTES = 8 * 1024
_STEP = tl.constexpr(0x9E3779B97F4A7C15)
_OTHER = tl.constexpr(0xD6E8FEB86659FD93)
_MASK = (1 << 64) - 1
_PARTS = tl.constexpr(12)  # words of a program's partial result
_TILES_PER_PROGRAM = 256


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
    """The row of ``tensor``: [15] int64 on its device, into ``row`` where it is given.

    A tensor that is not contiguous, or does not begin at a multiple of 16 bytes, is copied first. Nothing is read on
    the host, so that a CUDA graph may capture it. Raises UsageError for a type that is not in :data:`FORMATS`.
    """
    flat = _flat(tensor)
    check_same_device(flat, row)
    result = torch.empty(WIDTH, dtype=torch.int64, device=flat.device) if row is None else row
    if result.shape != (WIDTH,) or result.dtype != torch.int64 or not result.is_contiguous():
        raise UsageError(f"row is {result.dtype} {list(result.shape)}; contiguous int64 [{WIDTH}] is needed")
    programs = _programs(flat.numel() * flat.element_size(), num_sms(flat.device))
    _run(flat.data_ptr(), flat.numel(), None, flat.dtype, programs, result.view(1, WIDTH))
    return result


def summarize_many(table: Tensor, dtype: torch.dtype, most_bytes: int, rows: Tensor) -> None:
    """The rows [tensors, 15] int64 of tensors of one type at addresses that are read on the device, in one launch.

    ``table`` [tensors, 2] int64 on the device holds each tensor's address, a multiple of 16, and its number of elements
    (of a complex tensor twice as many); ``most_bytes`` is no less than what the largest one has. The table may be
    filled after a CUDA graph has captured the call, and the tensors must be contiguous and alive when it runs.
    """
    check_same_device(table, rows)
    if dtype not in FORMATS:
        raise UsageError(f"no statistics of {dtype} on the device")
    if table.shape != (len(rows), 2) or rows.shape[1:] != (WIDTH,) or {table.dtype, rows.dtype} != {torch.int64}:
        raise UsageError(f"table {list(table.shape)} and rows {list(rows.shape)}: int64 [n, 2] and [n, 15] are needed")
    if not table.is_contiguous() or not rows.is_contiguous():
        raise UsageError("table and rows are to be contiguous")
    if len(rows):
        _run(0, 0, table, dtype, _programs(most_bytes, num_sms(rows.device)), rows)


def table_of(tensors: Sequence[Tensor]) -> Tensor:
    """The table of :func:`summarize_many` for ``tensors``, on the CPU. Raises UsageError for what it cannot hold."""
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise UsageError("a tensor in the table is to be contiguous and to begin at a multiple of 16 bytes")
    counts = [tensor.numel() * (2 if tensor.is_complex() else 1) for tensor in tensors]
    return torch.tensor([[t.data_ptr(), count] for t, count in zip(tensors, counts, strict=True)], dtype=torch.int64)


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
    """How many share a tensor: one while it is small, enough to fill the device where it is not."""
    tiles = -(-nbytes // _TILE_BYTES)
    return max(1, min(tiles, 3 * sms), -(-tiles // _TILES_PER_PROGRAM))


def _run(address: int, count: int, table: Tensor | None, dtype: torch.dtype, programs: int, rows: Tensor) -> None:
    """Launch the kernel for every row, and the one that adds up where several programs share a tensor."""
    form, partial = FORMATS[dtype], rows
    if programs > 1:
        partial = torch.empty(len(rows), programs, 12, dtype=torch.int64, device=rows.device)
    constants = {
        "IS_FLOAT": form.kind == "float", "IS_SIGNED": form.kind == "signed", "BITS": form.bits,
        "MANTISSA": form.mantissa, "INFINITY": form.infinity, "NAN": form.nan, "IS_ALONE": programs == 1,
    }  # fmt: skip
    args = address, count, table, _keys(rows.device), partial
    _launch_summarize(rows.device, (programs, len(rows), 1), args, constants, num_warps=4)
    if programs > 1:
        sizes = {"SIZE": form.bits // 8, "BLOCK": max(64, next_power(programs))}
        _launch_merge(rows.device, (len(rows), 1, 1), (partial, count, table, rows, programs), sizes, num_warps=4)


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
def _sums(
    words, first, count, IS_FLOAT: tl.constexpr, IS_SIGNED: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr,
    INFINITY: tl.constexpr, NAN: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """(sum, sum of squares) of the finite elements of a tile, taken in ``dtype``, as float64."""
    total = tl.zeros_like(words).to(dtype)
    squares = tl.zeros_like(words).to(dtype)
    for k in tl.static_range(64 // BITS):
        bits = _bits(words, k, BITS)
        usable, _ = _finite(bits, first + k < count, IS_FLOAT, BITS, INFINITY, NAN)
        value = tl.where(usable, _value(bits, IS_FLOAT, IS_SIGNED, BITS, MANTISSA), 0.0).to(dtype)
        total += value
        squares += value * value
    return tl.sum(tl.sum(total, 1), 0).to(tl.float64), tl.sum(tl.sum(squares, 1), 0).to(tl.float64)


@triton.jit
def _tile(
    words, first, count, IS_FLOAT: tl.constexpr, IS_SIGNED: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr,
    INFINITY: tl.constexpr, NAN: tl.constexpr,
):  # fmt: skip
    """(nan, +inf, -inf, zeros) of 16 bits each in one word, subnormals, (min, max), bag of a tile of words."""
    narrow: tl.constexpr = IS_FLOAT and BITS < 64
    counts = tl.zeros_like(words)
    tiny = tl.zeros_like(words).to(tl.int32)
    bag = tl.zeros_like(words)
    low = tl.full(words.shape, float("inf"), tl.float32 if narrow else tl.float64)
    high = tl.full(words.shape, float("-inf"), tl.float32 if narrow else tl.float64)
    for k in tl.static_range(64 // BITS):
        bits, real = _bits(words, k, BITS), first + k < count
        usable, magnitude = _finite(bits, real, IS_FLOAT, BITS, INFINITY, NAN)
        counts += (real & (magnitude == 0)).to(tl.uint64) << 48
        if IS_FLOAT:
            counts += (real & (magnitude >= NAN)).to(tl.uint64)
            infinite = real & (magnitude == INFINITY)
            counts += (infinite & (bits == magnitude)).to(tl.uint64) << 16
            counts += (infinite & (bits != magnitude)).to(tl.uint64) << 32
            tiny += (real & (magnitude > 0) & (magnitude < (1 << MANTISSA))).to(tl.int32)
        value = _value(bits, IS_FLOAT, IS_SIGNED, BITS, MANTISSA)
        low = tl.minimum(low, tl.where(usable, value, float("inf")))
        high = tl.maximum(high, tl.where(usable, value, float("-inf")))
        bag += tl.where(real, _item(bits, BITS), 0)
    packed, extremes = tl.sum(tl.sum(counts, 1), 0), (tl.min(tl.min(low, 1), 0), tl.max(tl.max(high, 1), 0))
    return packed, tl.sum(tl.sum(tiny, 1), 0), extremes[0], extremes[1], tl.sum(tl.sum(bag, 1), 0)


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
def _place_of(address, count, table, tensor):
    """Address and number of elements of a tensor, given or from the table."""
    if table is not None:
        address = tl.load(table + 2 * tensor)
        count = tl.load(table + 2 * tensor + 1)
    return address, count


@triton.jit
def _words_of(data, tile, words, nbytes):
    """The words of a tile [_ROWS, _WORDS], zeros after the last byte, and which of them there are."""
    index = (tile * _ROWS + tl.arange(0, _ROWS)[:, None]) * _WORDS + tl.arange(0, _WORDS)[None, :]
    real = index < words
    read = tl.load(data + index, mask=real, other=0)
    left = tl.minimum(tl.maximum(nbytes - 8 * index, 1), 8)
    return read & (0xFFFFFFFFFFFFFFFF >> (64 - 8 * left).to(tl.uint64)), real, index


@triton.jit
def _hashed(words, real, tile, keys, count_words):
    """What a tile adds to the hash's two sums."""
    j, block = tl.arange(0, _WORDS)[None, :], tile * _ROWS + tl.arange(0, _ROWS)
    number = (block + 1).to(tl.uint64)
    key = tl.load(keys + j).to(tl.uint64, bitcast=True)
    one = tl.sum(tl.where(real, _product(words, key), 0), 1)
    key = tl.load(keys + 8 + j).to(tl.uint64, bitcast=True)
    two = tl.sum(tl.where(real, _product(words, key), 0), 1)
    some = block * _WORDS < count_words
    one = tl.where(some, _mixed(one + number * _STEP), 0)
    two = tl.where(some, _mixed(two + number * _OTHER), 0)
    return tl.sum(one, 0), tl.sum(two, 0)


@triton.jit(do_not_specialize=["address", "count"])
def _summarize_kernel(
    address, count, table, keys, partial, IS_FLOAT: tl.constexpr, IS_SIGNED: tl.constexpr, BITS: tl.constexpr,
    MANTISSA: tl.constexpr, INFINITY: tl.constexpr, NAN: tl.constexpr, IS_ALONE: tl.constexpr,
):  # fmt: skip
    """Every n-th tile of one tensor that n programs share: a finished row if n is 1, else a partial result."""
    program, tensor = tl.program_id(0), tl.program_id(1).to(tl.int64)
    address, count = _place_of(address, count, table, tensor)
    count = count.to(tl.int64)
    nbytes = count * (BITS // 8)
    data = tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(tl.uint64)), 16)
    words = (nbytes + 7) // 8
    nothing = nbytes * 0
    nan, posinf, neginf, zeros, tiny = nothing, nothing, nothing, nothing, nothing
    total, squares = nothing.to(tl.float64), nothing.to(tl.float64)
    low, high = total + float("inf"), total - float("inf")
    one, two, bag = nothing.to(tl.uint64), nothing.to(tl.uint64), nothing.to(tl.uint64)
    tiles = ((words + _ROWS * _WORDS - 1) // (_ROWS * _WORDS)).to(tl.int32)
    for step in tl.range(program, tiles, tl.num_programs(0), num_stages=3):
        tile = nothing + step
        read, real, index = _words_of(data, tile, words, nbytes)
        first = index * (64 // BITS)
        packed, few, least, most, items = _tile(
            read, first, count, IS_FLOAT, IS_SIGNED, BITS, MANTISSA, INFINITY, NAN
        )  # fmt: skip
        if IS_FLOAT and BITS < 64:
            reach = tl.maximum(most, -least)
            if (reach < 1e15) & ((reach > 1e-12) | (reach == 0.0)):
                added, added_squares = _sums(
                    read, first, count, IS_FLOAT, IS_SIGNED, BITS, MANTISSA, INFINITY, NAN, tl.float32
                )  # fmt: skip
            else:
                added, added_squares = _sums(
                    read, first, count, IS_FLOAT, IS_SIGNED, BITS, MANTISSA, INFINITY, NAN, tl.float64
                )  # fmt: skip
        else:
            added, added_squares = _sums(
                read, first, count, IS_FLOAT, IS_SIGNED, BITS, MANTISSA, INFINITY, NAN, tl.float64
            )  # fmt: skip
        more_one, more_two = _hashed(read, real, tile, keys, words)
        nan += (packed & 0xFFFF).to(tl.int64)
        posinf += ((packed >> 16) & 0xFFFF).to(tl.int64)
        neginf += ((packed >> 32) & 0xFFFF).to(tl.int64)
        zeros += (packed >> 48).to(tl.int64)
        tiny += few
        low, high = tl.minimum(low, least.to(tl.float64)), tl.maximum(high, most.to(tl.float64))
        total, squares = total + added, squares + added_squares
        one, two, bag = one + more_one, two + more_two, bag + items
    if IS_ALONE:
        row = partial + tensor * 15
        _store_row(row, count, BITS // 8, nan, posinf, neginf, zeros, tiny, low, high, total, squares, one, two, bag)
    else:
        part = partial + (tensor * tl.num_programs(0) + program) * _PARTS
        _store_part(part, nan, posinf, neginf, zeros, tiny, low, high, total, squares, one, two, bag)


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


@triton.jit(do_not_specialize=["count", "programs"])
def _merge_rows_kernel(partial, count, table, rows, programs, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The row of one tensor from the partial results of its programs, in their order."""
    tensor, program = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    _, count = _place_of(count, count, table, tensor)
    part, real = partial + (tensor * programs + program) * _PARTS, program < programs
    nan = tl.sum(tl.load(part, mask=real, other=0), 0)
    posinf = tl.sum(tl.load(part + 1, mask=real, other=0), 0)
    neginf = tl.sum(tl.load(part + 2, mask=real, other=0), 0)
    zeros = tl.sum(tl.load(part + 3, mask=real, other=0), 0)
    tiny = tl.sum(tl.load(part + 4, mask=real, other=0), 0)
    low = tl.min(tl.where(real, tl.load(part + 5, mask=real, other=0).to(tl.float64, bitcast=True), float("inf")), 0)
    high = tl.max(tl.where(real, tl.load(part + 6, mask=real, other=0).to(tl.float64, bitcast=True), float("-inf")), 0)
    total = tl.sum(tl.load(part + 7, mask=real, other=0).to(tl.float64, bitcast=True), 0)
    squares = tl.sum(tl.load(part + 8, mask=real, other=0).to(tl.float64, bitcast=True), 0)
    one = tl.sum(tl.load(part + 9, mask=real, other=0).to(tl.uint64, bitcast=True), 0)
    two = tl.sum(tl.load(part + 10, mask=real, other=0).to(tl.uint64, bitcast=True), 0)
    bag = tl.sum(tl.load(part + 11, mask=real, other=0).to(tl.uint64, bitcast=True), 0)
    row = rows + tensor * 15
    _store_row(
        row, count.to(tl.int64), SIZE, nan, posinf, neginf, zeros, tiny, low, high, total, squares, one, two, bag
    )


_launch_summarize, _launch_merge = Launcher(_summarize_kernel), Launcher(_merge_rows_kernel)
