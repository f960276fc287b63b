"""The row of a tensor's summary, and the partial results of the programs that share a tensor.

Both hold 64-bit words; kernels/triton/tap.py describes a row. A partial result has 12: nan, +inf, -inf, zeros,
subnormals, min, max, sum, sum of squares, the two sums of the hash, and bag.
"""

import triton
import triton.language as tl

from tapscope.kernels.triton.digest import STEP, mix64

WIDTH = 16
"""Words of a row."""
PART_WIDTH = 12
"""Words of a partial result."""


@triton.jit
def store_row(row, count, size, found):
    """A finished row, of elements of ``size`` bytes; minus zero becomes zero."""
    nan, posinf, neginf, zeros, tiny, low, high, total, squares, bag, one, two = found
    nbytes = count * size
    bag += tl.where(nbytes > count, count.to(tl.uint64) * STEP, 0)
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
    tl.store(row + 12, mix64(one + nbytes.to(tl.uint64)).to(tl.int64, bitcast=True))
    tl.store(row + 13, mix64(two + nbytes.to(tl.uint64)).to(tl.int64, bitcast=True))
    tl.store(row + 14, bag.to(tl.int64, bitcast=True))


@triton.jit
def store_part(part, stride, found):
    """A partial result, whose words are ``stride`` words apart."""
    nan, posinf, neginf, zeros, tiny, low, high, total, squares, bag, one, two = found
    tl.store(part, nan)
    tl.store(part + stride, posinf)
    tl.store(part + 2 * stride, neginf)
    tl.store(part + 3 * stride, zeros)
    tl.store(part + 4 * stride, tiny)
    tl.store(part + 5 * stride, low.to(tl.int64, bitcast=True))
    tl.store(part + 6 * stride, high.to(tl.int64, bitcast=True))
    tl.store(part + 7 * stride, total.to(tl.int64, bitcast=True))
    tl.store(part + 8 * stride, squares.to(tl.int64, bitcast=True))
    tl.store(part + 9 * stride, one.to(tl.int64, bitcast=True))
    tl.store(part + 10 * stride, two.to(tl.int64, bitcast=True))
    tl.store(part + 11 * stride, bag.to(tl.int64, bitcast=True))


@triton.jit
def _part(parts, stride, k: tl.constexpr, real):
    """One word of every program's partial result."""
    return tl.load(parts + k * stride, mask=real, other=0, cache_modifier=".cg")


@triton.jit
def merge_parts(parts, stride, programs, row, count, size, BLOCK: tl.constexpr):
    """The row of one tensor from the partial results of its programs, in a fixed order; ``stride`` as in store_part.

    Every lane adds up each BLOCK-th partial result, so that its loads do not wait for one another.
    """
    nan = tl.zeros([BLOCK], tl.int64)
    posinf, neginf, zeros, tiny = nan, nan, nan, nan
    total = tl.zeros([BLOCK], tl.float64)
    squares, low, high = total, total + float("inf"), total - float("inf")
    one = tl.zeros([BLOCK], tl.uint64)
    two, bag = one, one
    for begin in tl.range(0, programs, BLOCK):
        program = begin + tl.arange(0, BLOCK)
        real = program < programs
        at = parts + program
        nan += _part(at, stride, 0, real)
        posinf += _part(at, stride, 1, real)
        neginf += _part(at, stride, 2, real)
        zeros += _part(at, stride, 3, real)
        tiny += _part(at, stride, 4, real)
        low = tl.minimum(low, tl.where(real, _part(at, stride, 5, real).to(tl.float64, bitcast=True), float("inf")))
        high = tl.maximum(high, tl.where(real, _part(at, stride, 6, real).to(tl.float64, bitcast=True), float("-inf")))
        total += _part(at, stride, 7, real).to(tl.float64, bitcast=True)
        squares += _part(at, stride, 8, real).to(tl.float64, bitcast=True)
        one += _part(at, stride, 9, real).to(tl.uint64, bitcast=True)
        two += _part(at, stride, 10, real).to(tl.uint64, bitcast=True)
        bag += _part(at, stride, 11, real).to(tl.uint64, bitcast=True)
    # Not one reduction of a tuple: with the registers that it needs, the compiler serializes the loads above
    found = (
        tl.sum(nan, 0), tl.sum(posinf, 0), tl.sum(neginf, 0), tl.sum(zeros, 0), tl.sum(tiny, 0), tl.min(low, 0),
        tl.max(high, 0), tl.sum(total, 0), tl.sum(squares, 0), tl.sum(bag, 0), tl.sum(one, 0), tl.sum(two, 0),
    )  # fmt: skip
    store_row(row, count, size, found)
