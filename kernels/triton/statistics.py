"""Statistics and bag of the elements in blocks of a tensor, on the device.

They are accumulated lane by lane in a tuple of ten: nan, +inf, -inf, zeros, subnormals (int64), min, max, sum and sum
of squares of the finite elements (float64), and bag (uint64). A block of ordinary floats - no NaN, infinity or squares
outside of float32's range - is summed in float32; any other block is read again and summed in float64.
"""

import triton
import triton.language as tl

from tapscope.kernels.triton.digest import WORDS, bag_item, trimmed


@triton.jit
def empty_statistics(LANES: tl.constexpr):
    """The statistics of no elements, for each lane."""
    none = tl.zeros([LANES], tl.int64)
    zero = tl.zeros([LANES], tl.float64)
    bag = none.to(tl.uint64, bitcast=True)
    return none, none, none, none, none, zero + float("inf"), zero - float("inf"), zero, zero, bag


@triton.jit
def add_ordinary_block(lanes, words, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """(statistics with those of a whole block of floats of 16 or 32 bits, whether it is ordinary and was added)."""
    nan, posinf, neginf, zeros, tiny, low, high, total, squares, bag = lanes
    added, added_squares, least, most, nearest, items = _ordinary(words, BITS, MANTISSA)
    fits = (added_squares < 1e30) & ((added_squares > 1e-24) | ((least == 0.0) & (most == 0.0)))
    smallest: tl.constexpr = 6.103515625e-05 if MANTISSA == 10 else 1.1754943508222875e-38
    flags = tl.sum(tl.where(fits, 0, 65536) + tl.where(nearest < smallest, 1, 0), 0)
    is_ordinary = flags < 65536
    if is_ordinary:
        total += added.to(tl.float64)
        squares += added_squares.to(tl.float64)
        low = tl.minimum(low, least.to(tl.float64))
        high = tl.maximum(high, most.to(tl.float64))
        bag += items
        if flags != 0:
            few_zeros, few_tiny = _small(words, BITS, MANTISSA)
            zeros += few_zeros
            tiny += few_tiny
    return (nan, posinf, neginf, zeros, tiny, low, high, total, squares, bag), is_ordinary


@triton.jit
def offset_of(index, step, width, IS_STRIDED: tl.constexpr):
    """Word ``index`` of a tensor, in words from its start; its rows of ``width`` words are ``step`` words apart."""
    if IS_STRIDED:
        narrow = index.to(tl.uint32)
        row = narrow // width.to(tl.uint32)
        return row.to(tl.int64) * step + (narrow - row * width.to(tl.uint32)).to(tl.int64)
    else:
        return index


@triton.jit
def add_any_block(
    lanes, data, number, count, num_words, nbytes, step, width, IS_FLOAT: tl.constexpr, IS_SIGNED: tl.constexpr,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, INFINITY: tl.constexpr, NAN: tl.constexpr, LANES: tl.constexpr,
    IS_STRIDED: tl.constexpr,
):  # fmt: skip
    """Statistics with those of block ``number`` of any elements, which is read a row of words at a time.

    That needs fewer registers than a whole block.
    """
    nan, posinf, neginf, zeros, tiny, low, high, total, squares, bag = lanes
    for depth in range(WORDS // LANES):
        at = number * WORDS + depth * LANES + tl.arange(0, LANES)
        words = tl.load(data + offset_of(at, step, width, IS_STRIDED), mask=at < num_words, other=0)
        words = trimmed(words, at, nbytes)
        (
            few_nan, few_posinf, few_neginf, few_zeros, few_tiny, added, added_squares, least, most, items
        ) = _any(
            words, at * (64 // BITS), count, IS_FLOAT, IS_SIGNED, BITS, MANTISSA, INFINITY, NAN
        )  # fmt: skip
        nan += few_nan
        posinf += few_posinf
        neginf += few_neginf
        zeros += few_zeros
        tiny += few_tiny
        low = tl.minimum(low, least)
        high = tl.maximum(high, most)
        total += added
        squares += added_squares
        bag += items
    return nan, posinf, neginf, zeros, tiny, low, high, total, squares, bag


@triton.jit
def over_lanes(lanes):
    """The statistics of all lanes as one."""
    nan, posinf, neginf, zeros, tiny, low, high, total, squares, bag = lanes
    return (
        tl.sum(nan, 0), tl.sum(posinf, 0), tl.sum(neginf, 0), tl.sum(zeros, 0), tl.sum(tiny, 0), tl.min(low, 0),
        tl.max(high, 0), tl.sum(total, 0), tl.sum(squares, 0), tl.sum(bag, 0),
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
        bag += tl.where(real, bag_item(bits, BITS), 0)
    return nan, posinf, neginf, zeros, tiny, total, squares, low, high, bag


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
