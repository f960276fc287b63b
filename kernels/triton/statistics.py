"""Device functions for the statistics and the bag of the elements in blocks of a tensor.

A program processes a tile of [blocks, lanes] 64-bit words per iteration. It accumulates its statistics per word of the
tile, in a tuple of ten tensors: nan, +inf, -inf, zeros, subnormals (int32), min, max, sum and sum of squares of the
finite elements (float64), and bag (uint64). Whole blocks of 16- or 32-bit floats are first assumed to be ordinary:
no NaN, no infinity, and no squares outside of float32's range. Ordinary blocks are summed in float32. If one of a
program's blocks is not ordinary, the program rereads all of its blocks and sums in float64.
"""

import triton
import triton.language as tl

from tapscope.kernels.triton.digest import WORDS, bag_item, keys_at, product, trimmed
from tapscope.kernels.triton.launch import HAS_PTX

_UNROLLED = tl.constexpr(4)  # loads in flight per thread


@triton.jit
def empty_statistics(GROUP: tl.constexpr, LANES: tl.constexpr):
    """Return the initial statistics [GROUP, LANES], those of zero elements."""
    count = tl.zeros([GROUP, LANES], tl.int32)
    zero = tl.zeros([GROUP, LANES], tl.float64)
    bag = tl.zeros([GROUP, LANES], tl.uint64)
    return count, count, count, count, count, zero + float("inf"), zero - float("inf"), zero, zero, bag


@triton.jit
def no_ordinary_blocks(GROUP: tl.constexpr, LANES: tl.constexpr):
    """Return the initial accumulators [GROUP, LANES] of :func:`add_ordinary_blocks`.

    These are sum and sum of squares (float64), min and max (float32), the sum of the bag's 16-bit pieces (int64) and of
    their squares modulo 2^32 (int32), and flags: bit 0 for zeros or subnormals, bit 1 for a block that is not ordinary.
    """
    zero_int = tl.zeros([GROUP, LANES], tl.int32)
    zero = tl.zeros([GROUP, LANES], tl.float64)
    inf = tl.zeros([GROUP, LANES], tl.float32) + float("inf")
    return zero, zero, inf, -inf, zero_int.to(tl.int64), zero_int, zero_int


@triton.jit
def add_ordinary_blocks(
    ordinary, data, keys, first, place, rows, BITS: tl.constexpr, MANTISSA: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Accumulate whole blocks of 16- or 32-bit floats, assuming that they are ordinary (see the module docstring).

    ``first`` and ``place`` [blocks, lanes] are the indices of the first words in the tensor and in their block. Returns
    (updated ``ordinary``, the blocks' two sums of hash products [blocks]).
    """
    total, squares, low, high, bag, bag_squares, flags = ordinary
    one = bag.to(tl.uint64) * 0
    two = one
    sums = _empty_sums(flags * 0, BITS, MANTISSA)
    for depth in tl.range(0, WORDS // LANES, _UNROLLED):
        for k in tl.static_range(_UNROLLED):
            offset = (depth + k) * LANES
            words = tl.load(word_at(data, first + offset, rows))
            key_one, key_two = keys_at(keys, place + offset)
            one += product(words, key_one)
            two += product(words, key_two)
            sums = _add_word(sums, words, BITS, MANTISSA)
    added, added_squares, smallest, largest, min_abs, pieces, piece_squares = _unpack_extremes(sums, BITS, MANTISSA)
    fits = (added_squares < 1e30) & ((added_squares > 1e-24) | ((smallest == 0.0) & (largest == 0.0)))
    min_normal: tl.constexpr = 6.103515625e-05 if MANTISSA == 10 else 1.1754943508222875e-38
    flags |= tl.where(fits, 0, 2) | tl.where(min_abs < min_normal, 1, 0)
    ordinary = (
        total + added.to(tl.float64), squares + added_squares.to(tl.float64), tl.minimum(low, smallest),
        tl.maximum(high, largest), bag + pieces, bag_squares + piece_squares, flags,
    )  # fmt: skip
    return ordinary, tl.sum(one, 1), tl.sum(two, 1)


@triton.jit
def flags_of(ordinary):
    """Return 0 if all blocks were ordinary without zeros or subnormals, and at least 2^16 if one was not ordinary."""
    flags = ordinary[6]
    return tl.sum(tl.sum(tl.where(flags >= 2, 1 << 16, flags), 1), 0)


@triton.jit
def with_ordinary(stats, ordinary):
    """Return ``stats`` combined with the accumulators of ordinary blocks; zeros and subnormals are not counted."""
    nan, posinf, neginf, zeros, subnormals, low, high, total, squares, bag = stats
    added, added_squares, smallest, largest, pieces, piece_squares, _ = ordinary
    bag += pieces.to(tl.uint64, bitcast=True) + (piece_squares.to(tl.uint32, bitcast=True).to(tl.uint64) << 32)
    low, high = tl.minimum(low, smallest.to(tl.float64)), tl.maximum(high, largest.to(tl.float64))
    return nan, posinf, neginf, zeros, subnormals, low, high, total + added, squares + added_squares, bag


@triton.jit
def add_small(stats, data, first, rows, BITS: tl.constexpr, MANTISSA: tl.constexpr, LANES: tl.constexpr):
    """Add the numbers of zeros and subnormals of whole ordinary blocks to ``stats``."""
    nan, posinf, neginf, zeros, subnormals, low, high, total, squares, bag = stats
    for depth in range(WORDS // LANES):
        words = tl.load(word_at(data, first + depth * LANES, rows))
        word_zeros, word_subnormals = _count_small(words, BITS, MANTISSA)
        zeros += word_zeros
        subnormals += word_subnormals
    return nan, posinf, neginf, zeros, subnormals, low, high, total, squares, bag


@triton.jit
def word_at(data, index, rows):
    """Return the pointer to word ``index`` of a contiguous tensor (``rows`` is None) or of one with gaps between rows.

    ``rows`` is (gap, multiplier, shift), see :func:`tapscope.kernels.triton.tap.row_gap`. Rows are 16-byte-aligned and
    have an even number of words, so a thread can load two words with one 128-bit instruction.
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
    stats, data, keys, first, place, count, num_words, nbytes, rows, IS_FLOAT: tl.constexpr, IS_SIGNED: tl.constexpr,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, INFINITY: tl.constexpr, NAN: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Accumulate blocks of arbitrary elements, masked at the end of the tensor.

    Returns (updated ``stats``, the blocks' two sums of hash products [blocks]).
    """
    nan, posinf, neginf, zeros, subnormals, low, high, total, squares, bag = stats
    one = tl.zeros_like(bag)
    two = one
    for depth in range(WORDS // LANES):
        index = first + depth * LANES
        valid = index < num_words
        words = trimmed(tl.load(word_at(data, index, rows), mask=valid, other=0), index, nbytes)
        key_one, key_two = keys_at(keys, place + depth * LANES)
        one += tl.where(valid, product(words, key_one), 0)
        two += tl.where(valid, product(words, key_two), 0)
        (
            word_nan, word_posinf, word_neginf, word_zeros, word_subnormals, word_total, word_squares, word_min,
            word_max, word_bag
        ) = _word_statistics(
            words, index * (64 // BITS), count, IS_FLOAT, IS_SIGNED, BITS, MANTISSA, INFINITY, NAN
        )  # fmt: skip
        nan += word_nan
        posinf += word_posinf
        neginf += word_neginf
        zeros += word_zeros
        subnormals += word_subnormals
        low = tl.minimum(low, word_min)
        high = tl.maximum(high, word_max)
        total += word_total
        squares += word_squares
        bag += word_bag
    stats = nan, posinf, neginf, zeros, subnormals, low, high, total, squares, bag
    return stats, tl.sum(one, 1), tl.sum(two, 1)


@triton.jit
def over_tile(stats, one, two):
    """Reduce the statistics and the two hash sums of a tile to scalars; counts become int64."""
    nan, posinf, neginf, zeros, subnormals, low, high, total, squares, bag = stats
    tile = (
        nan.to(tl.int64), posinf.to(tl.int64), neginf.to(tl.int64), zeros.to(tl.int64), subnormals.to(tl.int64), low,
        high, total, squares, bag,
    )  # fmt: skip
    (
        nan, posinf, neginf, zeros, subnormals, low, high, total, squares, bag
    ) = tl.reduce(tile, 1, _combine)  # fmt: skip
    return tl.reduce(
        (nan, posinf, neginf, zeros, subnormals, low, high, total, squares, bag, one, two), 0, _combine_with_hash
    )


@triton.jit
def _combine(
    nan, posinf, neginf, zeros, subnormals, low, high, total, squares, bag, nan2, posinf2, neginf2, zeros2, subnormals2,
    low2, high2, total2, squares2, bag2,
):  # fmt: skip
    """Combine the statistics of two sets of elements; one reduction over ten values needs fewer barriers than ten."""
    return (
        nan + nan2, posinf + posinf2, neginf + neginf2, zeros + zeros2, subnormals + subnormals2, tl.minimum(low, low2),
        tl.maximum(high, high2), total + total2, squares + squares2, bag + bag2,
    )  # fmt: skip


@triton.jit
def _combine_with_hash(
    nan, posinf, neginf, zeros, subnormals, low, high, total, squares, bag, one, two, nan2, posinf2, neginf2, zeros2,
    subnormals2, low2, high2, total2, squares2, bag2, one2, two2,
):  # fmt: skip
    """Combine like :func:`_combine`, with the two hash sums."""
    return (
        nan + nan2, posinf + posinf2, neginf + neginf2, zeros + zeros2, subnormals + subnormals2, tl.minimum(low, low2),
        tl.maximum(high, high2), total + total2, squares + squares2, bag + bag2, one + one2, two + two2,
    )  # fmt: skip


@triton.jit
def _empty_sums(zero, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """Return the initial accumulators of :func:`_add_word`; extremes of 16-bit floats are packed in pairs."""
    zero_f32 = zero.to(tl.float32)
    if BITS == 16 and HAS_PTX:
        inf_pair: tl.constexpr = 0x7F807F80 if MANTISSA == 7 else 0x7C007C00
        inf = zero.to(tl.uint32, bitcast=True) + inf_pair
        return zero_f32, zero_f32, inf, inf ^ 0x80008000, inf, zero, zero
    else:
        return zero_f32, zero_f32, zero_f32 + float("inf"), zero_f32 - float("inf"), zero_f32 + float("inf"), zero, zero


@triton.jit
def _unpack_extremes(sums, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """Return the accumulators with packed 16-bit extremes reduced to one float32 value per lane."""
    total, squares, low, high, min_abs, pieces, piece_squares = sums
    if BITS == 16 and HAS_PTX:
        return (
            total, squares, tl.minimum(_lower_value(low, MANTISSA), _upper_value(low, MANTISSA)),
            tl.maximum(_lower_value(high, MANTISSA), _upper_value(high, MANTISSA)),
            tl.minimum(_lower_value(min_abs, MANTISSA), _upper_value(min_abs, MANTISSA)), pieces, piece_squares,
        )  # fmt: skip
    else:
        return sums


@triton.jit
def _add_word(sums, words, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """Accumulate the sums (float32), extremes and bag of the ordinary floats in ``words``.

    The caller checks for values outside of float32's range. The bag's 16-bit pieces and their squares (modulo 2^32)
    have separate accumulators.
    """
    for k in tl.static_range(2):
        half = (words >> (32 * k)).to(tl.uint32)
        if BITS == 16:
            sums = _add_two(sums, half, MANTISSA)
        else:
            value = half.to(tl.float32, bitcast=True)
            spread = half * 0x9E3779B1
            spread = (spread ^ (spread >> 7)).to(tl.int32, bitcast=True)
            total, squares, low, high, min_abs, pieces, piece_squares = sums
            low, high = tl.minimum(low, value), tl.maximum(high, value)
            min_abs = tl.minimum(min_abs, tl.abs(value))
            pieces, piece_squares = _add_pieces(pieces, piece_squares, spread >> 16, (spread << 16) >> 16)
            sums = total + value, squares + value * value, low, high, min_abs, pieces, piece_squares
    return sums


@triton.jit
def _add_two(sums, half, MANTISSA: tl.constexpr):
    """Accumulate the two 16-bit elements in ``half`` (uint32)."""
    total, squares, low, high, min_abs, pieces, piece_squares = sums
    one, two = _lower_value(half, MANTISSA), _upper_value(half, MANTISSA)
    if HAS_PTX:
        low, high = _packed_extreme("min", low, half, MANTISSA), _packed_extreme("max", high, half, MANTISSA)
        min_abs = _packed_extreme("min", min_abs, half & 0x7FFF7FFF, MANTISSA)
    else:
        low, high = tl.minimum(tl.minimum(low, one), two), tl.maximum(tl.maximum(high, one), two)
        min_abs = tl.minimum(tl.minimum(min_abs, tl.abs(one)), tl.abs(two))
    # The 16-bit products of both elements, packed in one 32-bit word
    spread = ((half * 0x9E3B0000) >> 16) | (((half & 0xFFFF0000) * 0x9E3B) & 0xFFFF0000)
    spread = (spread ^ ((spread >> 5) & 0x07FF07FF)).to(tl.int32, bitcast=True)
    pieces, piece_squares = _add_pieces(pieces, piece_squares, spread >> 16, (spread << 16) >> 16)
    return total + one + two, squares + one * one + two * two, low, high, min_abs, pieces, piece_squares


@triton.jit
def _add_pieces(pieces, piece_squares, one, two):
    """Accumulate two 16-bit pieces of the bag and their squares."""
    return pieces + one + two, piece_squares + one * one + two * two


@triton.jit
def _lower_value(half, MANTISSA: tl.constexpr):
    """Convert the lower 16-bit element in ``half`` (uint32) to float32."""
    if MANTISSA == 7:
        return (half << 16).to(tl.float32, bitcast=True)
    else:
        return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _upper_value(half, MANTISSA: tl.constexpr):
    """Convert the upper 16-bit element in ``half`` (uint32) to float32."""
    if MANTISSA == 7:
        return (half & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        return (half >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _packed_extreme(op: tl.constexpr, one, other, MANTISSA: tl.constexpr):
    """Return the ``min`` or ``max`` of packed 16-bit floats (bf16x2, f16x2) in one PTX instruction; ignores NaN."""
    dtype_name: tl.constexpr = "bf16x2" if MANTISSA == 7 else "f16x2"
    code: tl.constexpr = op + "." + dtype_name + " $0, $1, $2;"
    return tl.inline_asm_elementwise(code, "=r,r,r", [one, other], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def _count_small(words, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """Return the numbers of (zeros, subnormals) in each word of ordinary floats."""
    zeros = tl.zeros_like(words).to(tl.int32)
    subnormals = zeros
    for k in tl.static_range(64 // BITS):
        magnitude = _element_bits(words, k, BITS) & ((1 << (BITS - 1)) - 1)
        zeros += (magnitude == 0).to(tl.int32)
        subnormals += (magnitude < (1 << MANTISSA)).to(tl.int32)
    return zeros, subnormals - zeros


@triton.jit
def _word_statistics(
    words, first, count, IS_FLOAT: tl.constexpr, IS_SIGNED: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr,
    INFINITY: tl.constexpr, NAN: tl.constexpr,
):  # fmt: skip
    """Return the statistics of each word of arbitrary elements; sums accumulate in float64.

    The results are nan, +inf, -inf, zeros, subnormals, sum, sum of squares, min, max and bag. Elements from ``count``
    on are masked.
    """
    nan = tl.zeros_like(words).to(tl.int32)
    posinf, neginf, zeros, subnormals = nan, nan, nan, nan
    bag = tl.zeros_like(words)
    total = tl.zeros_like(words).to(tl.float64)
    squares = total
    low, high = total + float("inf"), total - float("inf")
    for k in tl.static_range(64 // BITS):
        bits, valid = _element_bits(words, k, BITS), first + k < count
        finite, magnitude = _finite_mask(bits, valid, IS_FLOAT, BITS, INFINITY, NAN)
        zeros += (valid & (magnitude == 0)).to(tl.int32)
        if IS_FLOAT:
            nan += (valid & (magnitude >= NAN)).to(tl.int32)
            infinite = valid & (magnitude == INFINITY)
            posinf += (infinite & (bits == magnitude)).to(tl.int32)
            neginf += (infinite & (bits != magnitude)).to(tl.int32)
            subnormals += (valid & (magnitude > 0) & (magnitude < (1 << MANTISSA))).to(tl.int32)
        value = value_of(bits, IS_FLOAT, IS_SIGNED, BITS, MANTISSA).to(tl.float64)
        low = tl.minimum(low, tl.where(finite, value, float("inf")))
        high = tl.maximum(high, tl.where(finite, value, float("-inf")))
        value = tl.where(finite, value, 0.0)
        total += value
        squares += value * value
        bag += tl.where(valid, bag_item(bits, BITS), 0)
    return nan, posinf, neginf, zeros, subnormals, total, squares, low, high, bag


@triton.jit
def _element_bits(words, k: tl.constexpr, BITS: tl.constexpr):
    """Return the bits of element ``k`` of each word (uint64) as int32, or as int64 for 64-bit elements."""
    if BITS == 64:
        return words.to(tl.int64, bitcast=True)
    elif BITS == 32:
        return (words >> (32 * k)).to(tl.uint32).to(tl.int32, bitcast=True)
    else:
        return ((words >> (BITS * k)) & ((1 << BITS) - 1)).to(tl.int32)


@triton.jit
def _finite_mask(
    bits, valid, IS_FLOAT: tl.constexpr, BITS: tl.constexpr, INFINITY: tl.constexpr, NAN: tl.constexpr
):  # fmt: skip
    """Return (mask of the valid finite elements, magnitudes)."""
    sign: tl.constexpr = (1 << (BITS - 1)) - 1
    magnitude = bits & sign
    if IS_FLOAT:
        return valid & (magnitude < NAN) & (magnitude != INFINITY), magnitude
    else:
        return valid, bits


@triton.jit
def value_of(bits, IS_FLOAT: tl.constexpr, IS_SIGNED: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """Convert the bits of an element (int32 or int64) to float32 for floats of up to 32 bits, else to float64."""
    if IS_FLOAT:
        if BITS == 64:
            return bits.to(tl.float64, bitcast=True)
        elif BITS == 32:
            return bits.to(tl.float32, bitcast=True)
        elif MANTISSA == 7:
            return (bits << 16).to(tl.float32, bitcast=True)
        elif BITS == 16:
            return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        elif MANTISSA == 2:  # float8_e5m2: the upper byte of a float16
            return (bits << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        else:  # float8_e4m3fn: the exponent bias of float32 is larger by 120
            magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
            return tl.where(bits >= 128, -magnitude, magnitude)
    elif IS_SIGNED and BITS < 32:
        half: tl.constexpr = 1 << (BITS - 1)
        return ((bits ^ half) - half).to(tl.float64)
    else:
        return bits.to(tl.float64)
