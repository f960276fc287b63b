"""Layout of a tensor's summary row, and of the partial results of the programs that share a tensor.

Both consist of 64-bit words. kernels/triton/tap.py describes the summary row. A partial result has 12 words: counts of
nan, +inf, -inf, zeros and subnormals, min, max, sum, sum of squares, the two sums of the hash, and the bag.
"""

import triton
import triton.language as tl

from tapscope.kernels.triton.digest import STEP, mix64

WIDTH = 16
"""Words of a summary row."""
PART_WIDTH = 12
"""Words of a partial result."""


@triton.jit
def store_row(row, count, size, stats):
    """Store the final summary row of ``count`` elements of ``size`` bytes; -0.0 is stored as 0.0.

    ``stats`` is the tuple that :func:`.statistics.over_tile` returns.
    """
    nan, posinf, neginf, zeros, subnormals, low, high, total, squares, bag, one, two = stats
    nbytes = count * size
    bag += tl.where(nbytes > count, count.to(tl.uint64) * STEP, 0)
    finite = count - nan - posinf - neginf
    low, high = tl.where(low == 0.0, 0.0, low), tl.where(high == 0.0, 0.0, high)
    max_abs = tl.where(finite > 0, tl.maximum(high, -low), 0.0)
    tl.store(row, count)
    tl.store(row + 1, nan)
    tl.store(row + 2, posinf)
    tl.store(row + 3, neginf)
    tl.store(row + 4, zeros)
    tl.store(row + 5, subnormals)
    tl.store(row + 6, finite)
    tl.store(row + 7, low.to(tl.int64, bitcast=True))
    tl.store(row + 8, high.to(tl.int64, bitcast=True))
    tl.store(row + 9, tl.where(max_abs == 0.0, 0.0, max_abs).to(tl.int64, bitcast=True))
    tl.store(row + 10, tl.where(total == 0.0, 0.0, total).to(tl.int64, bitcast=True))
    tl.store(row + 11, squares.to(tl.int64, bitcast=True))
    tl.store(row + 12, mix64(one + nbytes.to(tl.uint64)).to(tl.int64, bitcast=True))
    tl.store(row + 13, mix64(two + nbytes.to(tl.uint64)).to(tl.int64, bitcast=True))
    tl.store(row + 14, bag.to(tl.int64, bitcast=True))


@triton.jit
def store_part(part, stride, stats):
    """Store a partial result with consecutive words ``stride`` words apart (structure of arrays)."""
    nan, posinf, neginf, zeros, subnormals, low, high, total, squares, bag, one, two = stats
    tl.store(part, nan)
    tl.store(part + stride, posinf)
    tl.store(part + 2 * stride, neginf)
    tl.store(part + 3 * stride, zeros)
    tl.store(part + 4 * stride, subnormals)
    tl.store(part + 5 * stride, low.to(tl.int64, bitcast=True))
    tl.store(part + 6 * stride, high.to(tl.int64, bitcast=True))
    tl.store(part + 7 * stride, total.to(tl.int64, bitcast=True))
    tl.store(part + 8 * stride, squares.to(tl.int64, bitcast=True))
    tl.store(part + 9 * stride, one.to(tl.int64, bitcast=True))
    tl.store(part + 10 * stride, two.to(tl.int64, bitcast=True))
    tl.store(part + 11 * stride, bag.to(tl.int64, bitcast=True))


@triton.jit
def _part(parts, stride, k: tl.constexpr, valid):
    """Load word ``k`` of the partial results at ``parts``; ``.cg`` caches in L2 only."""
    return tl.load(parts + k * stride, mask=valid, other=0, cache_modifier=".cg")


@triton.jit
def merge_parts(parts, stride, programs, row, count, size, BLOCK: tl.constexpr):
    """Reduce the partial results of a tensor's programs in a fixed order and store its summary row.

    ``stride`` is as in :func:`store_part`. Each lane accumulates every BLOCK-th partial result, so that its loads are
    independent.
    """
    nan = tl.zeros([BLOCK], tl.int64)
    posinf, neginf, zeros, subnormals = nan, nan, nan, nan
    total = tl.zeros([BLOCK], tl.float64)
    squares, low, high = total, total + float("inf"), total - float("inf")
    one = tl.zeros([BLOCK], tl.uint64)
    two, bag = one, one
    for begin in tl.range(0, programs, BLOCK):
        program = begin + tl.arange(0, BLOCK)
        valid = program < programs
        ptr = parts + program
        nan += _part(ptr, stride, 0, valid)
        posinf += _part(ptr, stride, 1, valid)
        neginf += _part(ptr, stride, 2, valid)
        zeros += _part(ptr, stride, 3, valid)
        subnormals += _part(ptr, stride, 4, valid)
        low = tl.minimum(low, tl.where(valid, _part(ptr, stride, 5, valid).to(tl.float64, bitcast=True), float("inf")))
        high = tl.maximum(
            high, tl.where(valid, _part(ptr, stride, 6, valid).to(tl.float64, bitcast=True), float("-inf"))
        )
        total += _part(ptr, stride, 7, valid).to(tl.float64, bitcast=True)
        squares += _part(ptr, stride, 8, valid).to(tl.float64, bitcast=True)
        one += _part(ptr, stride, 9, valid).to(tl.uint64, bitcast=True)
        two += _part(ptr, stride, 10, valid).to(tl.uint64, bitcast=True)
        bag += _part(ptr, stride, 11, valid).to(tl.uint64, bitcast=True)
    # Separate reductions: a single tuple reduction raises register pressure so far that the loads above are serialized
    stats = (
        tl.sum(nan, 0), tl.sum(posinf, 0), tl.sum(neginf, 0), tl.sum(zeros, 0), tl.sum(subnormals, 0), tl.min(low, 0),
        tl.max(high, 0), tl.sum(total, 0), tl.sum(squares, 0), tl.sum(bag, 0), tl.sum(one, 0), tl.sum(two, 0),
    )  # fmt: skip
    store_row(row, count, size, stats)
