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
_PART_WIDTH = tl.constexpr(PART_WIDTH)


@triton.jit
def store_row(row, count, SIZE: tl.constexpr, statistics, one, two):
    """A finished row, of elements of SIZE bytes; minus zero becomes zero."""
    nan, posinf, neginf, zeros, tiny, low, high, total, squares, bag = statistics
    nbytes = count * SIZE
    if SIZE > 1:
        bag += count.to(tl.uint64) * STEP
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
def store_part(part, statistics, one, two):
    """A partial result."""
    nan, posinf, neginf, zeros, tiny, low, high, total, squares, bag = statistics
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
def merge_parts(parts, programs, row, count, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The row of one tensor from the partial results of its programs, in their order."""
    program = tl.arange(0, BLOCK)
    real = program < programs
    parts += program * _PART_WIDTH
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
    statistics = nan, posinf, neginf, zeros, tiny, low, high, total, squares, bag
    store_row(row, count, SIZE, statistics, one, two)
