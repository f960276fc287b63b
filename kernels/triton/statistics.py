"""Statistics and bag of the elements in blocks of a tensor, on the device.

A program looks at a tile of [blocks, lanes] words at a time. What it finds is accumulated word by word of the tile in
a tuple of ten: nan, +inf, -inf, zeros, subnormals (int32), min, max, sum and sum of squares of the finite elements
(float64), and bag (uint64). Whole blocks of 16- or 32-bit floats are first assumed to be ordinary: without NaN,
infinity, and squares outside of float32's range. Ordinary blocks are summed in float32. If one of a program's blocks
is not ordinary, the program reads all of them again and sums in float64.
"""

import triton
import triton.language as tl

from tapscope.kernels.triton.digest import WORDS, bag_item, keys_at, product, trimmed
from tapscope.kernels.triton.launch import HAS_PTX

_UNROLLED = tl.constexpr(4)  # words that a thread loads before it computes


@triton.jit
def empty_statistics(GROUP: tl.constexpr, LANES: tl.constexpr):
    """The statistics of no elements."""
    none = tl.zeros([GROUP, LANES], tl.int32)
    zero = tl.zeros([GROUP, LANES], tl.float64)
    bag = tl.zeros([GROUP, LANES], tl.uint64)
    return none, none, none, none, none, zero + float("inf"), zero - float("inf"), zero, zero, bag


@triton.jit
def no_ordinary_blocks(GROUP: tl.constexpr, LANES: tl.constexpr):
    """What :func:`add_ordinary_blocks` adds to: sum and sum of squares (float64), min and max (float32), the sums of
    the bag's pieces (int64) and, modulo 2^32, of their squares (int32), and flags: 1 for zeros or subnormals, 2 for a
    block that is not ordinary."""
    none = tl.zeros([GROUP, LANES], tl.int32)
    zero = tl.zeros([GROUP, LANES], tl.float64)
    far = tl.zeros([GROUP, LANES], tl.float32) + float("inf")
    return zero, zero, far, -far, none.to(tl.int64), none, none


@triton.jit
def add_ordinary_blocks(
    ordinary, data, keys, first, place, rows, BITS: tl.constexpr, MANTISSA: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Add whole blocks of 16- or 32-bit floats, as if they were ordinary (see above).

    ``first`` and ``place`` [blocks, lanes] are the first words in the tensor and in their block. Returns (``ordinary``
    with them, the two sums of products of each block).
    """
    total, squares, low, high, bag, bag_squares, flags = ordinary
    one = bag.to(tl.uint64) * 0
    two = one
    sums = _empty_sums(flags * 0, BITS, MANTISSA)
    for depth in tl.range(0, WORDS // LANES, _UNROLLED):
        for k in tl.static_range(_UNROLLED):
            at = (depth + k) * LANES
            words = tl.load(word_at(data, first + at, rows))
            key_one, key_two = keys_at(keys, place + at)
            one += product(words, key_one)
            two += product(words, key_two)
            sums = _add_word(sums, words, BITS, MANTISSA)
    added, added_squares, least, most, nearest, pieces, piece_squares = _unpacked(sums, BITS, MANTISSA)
    fits = (added_squares < 1e30) & ((added_squares > 1e-24) | ((least == 0.0) & (most == 0.0)))
    smallest: tl.constexpr = 6.103515625e-05 if MANTISSA == 10 else 1.1754943508222875e-38
    flags |= tl.where(fits, 0, 2) | tl.where(nearest < smallest, 1, 0)
    ordinary = (
        total + added.to(tl.float64), squares + added_squares.to(tl.float64), tl.minimum(low, least),
        tl.maximum(high, most), bag + pieces, bag_squares + piece_squares, flags,
    )  # fmt: skip
    return ordinary, tl.sum(one, 1), tl.sum(two, 1)


@triton.jit
def flags_of(ordinary):
    """0 if all blocks were ordinary and had neither zeros nor subnormals, 2^16 and more if one was not ordinary."""
    flags = ordinary[6]
    return tl.sum(tl.sum(tl.where(flags >= 2, 1 << 16, flags), 1), 0)


@triton.jit
def with_ordinary(found, ordinary):
    """The statistics with those of ordinary blocks, without their zeros and subnormals."""
    nan, posinf, neginf, zeros, tiny, low, high, total, squares, bag = found
    added, added_squares, least, most, pieces, piece_squares, _ = ordinary
    bag += pieces.to(tl.uint64, bitcast=True) + (piece_squares.to(tl.uint32, bitcast=True).to(tl.uint64) << 32)
    low, high = tl.minimum(low, least.to(tl.float64)), tl.maximum(high, most.to(tl.float64))
    return nan, posinf, neginf, zeros, tiny, low, high, total + added, squares + added_squares, bag


@triton.jit
def add_small(found, data, first, rows, BITS: tl.constexpr, MANTISSA: tl.constexpr, LANES: tl.constexpr):
    """Add the zeros and subnormals of whole ordinary blocks."""
    nan, posinf, neginf, zeros, tiny, low, high, total, squares, bag = found
    for depth in range(WORDS // LANES):
        words = tl.load(word_at(data, first + depth * LANES, rows))
        few_zeros, few_tiny = _small(words, BITS, MANTISSA)
        zeros += few_zeros
        tiny += few_tiny
    return nan, posinf, neginf, zeros, tiny, low, high, total, squares, bag


@triton.jit
def word_at(data, index, rows):
    """Pointer to word ``index`` of a tensor: of one run of words (``rows`` is None), or of rows that lie apart, see
    :func:`tapscope.kernels.triton.tap.row_gap`.

    Rows begin at multiples of 16 bytes and have an even number of words, so that a thread loads two words together.
    """
    if rows is None:
        return data + index
    else:
        gap, multiplier, shift = rows
        row = tl.umulhi(index.to(tl.uint32), multiplier) >> shift
        start = (data + index).to(tl.pointer_type(tl.uint8))
        at = (start + row.to(tl.uint64) * gap).to(tl.pointer_type(tl.uint64))
        return tl.multiple_of(tl.max_contiguous(at, [1, 2]), [1, 16])


@triton.jit
def add_any_blocks(
    found, data, keys, first, place, count, num_words, nbytes, rows, IS_FLOAT: tl.constexpr, IS_SIGNED: tl.constexpr,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, INFINITY: tl.constexpr, NAN: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Add blocks of any elements to the statistics, as far as the tensor goes. Returns (statistics, the two sums of
    products of each block)."""
    nan, posinf, neginf, zeros, tiny, low, high, total, squares, bag = found
    one = tl.zeros_like(bag)
    two = one
    for depth in range(WORDS // LANES):
        at = first + depth * LANES
        real = at < num_words
        words = trimmed(tl.load(word_at(data, at, rows), mask=real, other=0), at, nbytes)
        key_one, key_two = keys_at(keys, place + depth * LANES)
        one += tl.where(real, product(words, key_one), 0)
        two += tl.where(real, product(words, key_two), 0)
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
    found = nan, posinf, neginf, zeros, tiny, low, high, total, squares, bag
    return found, tl.sum(one, 1), tl.sum(two, 1)


@triton.jit
def over_tile(found, one, two):
    """The statistics of the whole tile, and the two sums of the hash of all its blocks: counts in int64."""
    nan, posinf, neginf, zeros, tiny, low, high, total, squares, bag = found
    tile = (
        nan.to(tl.int64), posinf.to(tl.int64), neginf.to(tl.int64), zeros.to(tl.int64), tiny.to(tl.int64), low, high,
        total, squares, bag,
    )  # fmt: skip
    (
        nan, posinf, neginf, zeros, tiny, low, high, total, squares, bag
    ) = tl.reduce(tile, 1, _combine)  # fmt: skip
    return tl.reduce(
        (nan, posinf, neginf, zeros, tiny, low, high, total, squares, bag, one, two), 0, _combine_with_hash
    )


@triton.jit
def _combine(
    nan, posinf, neginf, zeros, tiny, low, high, total, squares, bag, nan2, posinf2, neginf2, zeros2, tiny2, low2,
    high2, total2, squares2, bag2,
):  # fmt: skip
    """The statistics of two sets of elements. One reduction of ten values has the barriers of one, not of ten."""
    return (
        nan + nan2, posinf + posinf2, neginf + neginf2, zeros + zeros2, tiny + tiny2, tl.minimum(low, low2),
        tl.maximum(high, high2), total + total2, squares + squares2, bag + bag2,
    )  # fmt: skip


@triton.jit
def _combine_with_hash(
    nan, posinf, neginf, zeros, tiny, low, high, total, squares, bag, one, two, nan2, posinf2, neginf2, zeros2, tiny2,
    low2, high2, total2, squares2, bag2, one2, two2,
):  # fmt: skip
    """As :func:`_combine`, with the sums of the hash."""
    return (
        nan + nan2, posinf + posinf2, neginf + neginf2, zeros + zeros2, tiny + tiny2, tl.minimum(low, low2),
        tl.maximum(high, high2), total + total2, squares + squares2, bag + bag2, one + one2, two + two2,
    )  # fmt: skip


@triton.jit
def _empty_sums(none, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """What :func:`_add_word` adds to. Extremes of 16-bit floats are two in a word, of its lower and upper elements."""
    nought = none.to(tl.float32)
    if BITS == 16 and HAS_PTX:
        most: tl.constexpr = 0x7F807F80 if MANTISSA == 7 else 0x7C007C00
        far = none.to(tl.uint32, bitcast=True) + most
        return nought, nought, far, far ^ 0x80008000, far, none, none
    else:
        return nought, nought, nought + float("inf"), nought - float("inf"), nought + float("inf"), none, none


@triton.jit
def _unpacked(sums, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """The sums with one element in each word."""
    total, squares, low, high, least, pieces, piece_squares = sums
    if BITS == 16 and HAS_PTX:
        return (
            total, squares, tl.minimum(_lower(low, MANTISSA), _upper(low, MANTISSA)),
            tl.maximum(_lower(high, MANTISSA), _upper(high, MANTISSA)),
            tl.minimum(_lower(least, MANTISSA), _upper(least, MANTISSA)), pieces, piece_squares,
        )  # fmt: skip
    else:
        return sums


@triton.jit
def _add_word(sums, words, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """Sums (float32) and extremes of ordinary floats, and their bag in two halves, with those of ``words``.

    The caller checks that nothing has left float32's range. Pieces of 16 bits and, modulo 2^32, their squares are
    added up apart.
    """
    for k in tl.static_range(2):
        half = (words >> (32 * k)).to(tl.uint32)
        if BITS == 16:
            sums = _add_two(sums, half, MANTISSA)
        else:
            value = half.to(tl.float32, bitcast=True)
            spread = half * 0x9E3779B1
            spread = (spread ^ (spread >> 7)).to(tl.int32, bitcast=True)
            total, squares, low, high, least, pieces, piece_squares = sums
            low, high = tl.minimum(low, value), tl.maximum(high, value)
            least = tl.minimum(least, tl.abs(value))
            pieces, piece_squares = _add_pieces(pieces, piece_squares, spread >> 16, (spread << 16) >> 16)
            sums = total + value, squares + value * value, low, high, least, pieces, piece_squares
    return sums


@triton.jit
def _add_two(sums, half, MANTISSA: tl.constexpr):
    """The sums with the two elements of 16 bits in ``half`` (uint32)."""
    total, squares, low, high, least, pieces, piece_squares = sums
    one, two = _lower(half, MANTISSA), _upper(half, MANTISSA)
    if HAS_PTX:
        low, high = _packed("min", low, half, MANTISSA), _packed("max", high, half, MANTISSA)
        least = _packed("min", least, half & 0x7FFF7FFF, MANTISSA)
    else:
        low, high = tl.minimum(tl.minimum(low, one), two), tl.maximum(tl.maximum(high, one), two)
        least = tl.minimum(tl.minimum(least, tl.abs(one)), tl.abs(two))
    # Both products of 16 bits, which are one word then
    spread = ((half * 0x9E3B0000) >> 16) | (((half & 0xFFFF0000) * 0x9E3B) & 0xFFFF0000)
    spread = (spread ^ ((spread >> 5) & 0x07FF07FF)).to(tl.int32, bitcast=True)
    pieces, piece_squares = _add_pieces(pieces, piece_squares, spread >> 16, (spread << 16) >> 16)
    return total + one + two, squares + one * one + two * two, low, high, least, pieces, piece_squares


@triton.jit
def _add_pieces(pieces, piece_squares, one, two):
    """Sums with two pieces of the bag."""
    return pieces + one + two, piece_squares + one * one + two * two


@triton.jit
def _lower(half, MANTISSA: tl.constexpr):
    """The lower element of 16 bits in ``half`` (uint32), in float32."""
    if MANTISSA == 7:
        return (half << 16).to(tl.float32, bitcast=True)
    else:
        return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _upper(half, MANTISSA: tl.constexpr):
    """The upper one."""
    if MANTISSA == 7:
        return (half & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        return (half >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _packed(what: tl.constexpr, one, other, MANTISSA: tl.constexpr):
    """The less (``min``) or greater (``max``) of two pairs of 16-bit floats, in one instruction; NaN never is."""
    kind: tl.constexpr = "bf16x2" if MANTISSA == 7 else "f16x2"
    code: tl.constexpr = what + "." + kind + " $0, $1, $2;"
    return tl.inline_asm_elementwise(code, "=r,r,r", [one, other], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def _small(words, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """(zeros, subnormals) of words of ordinary floats."""
    zeros = tl.zeros_like(words).to(tl.int32)
    tiny = zeros
    for k in tl.static_range(64 // BITS):
        magnitude = _bits(words, k, BITS) & ((1 << (BITS - 1)) - 1)
        zeros += (magnitude == 0).to(tl.int32)
        tiny += (magnitude < (1 << MANTISSA)).to(tl.int32)
    return zeros, tiny - zeros


@triton.jit
def _any(
    words, first, count, IS_FLOAT: tl.constexpr, IS_SIGNED: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr,
    INFINITY: tl.constexpr, NAN: tl.constexpr,
):  # fmt: skip
    """Of words of any elements, for each word: nan, +inf, -inf, zeros, subnormals, sum, sum of squares, min,
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
        value = value_of(bits, IS_FLOAT, IS_SIGNED, BITS, MANTISSA).to(tl.float64)
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
def value_of(bits, IS_FLOAT: tl.constexpr, IS_SIGNED: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr):
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
