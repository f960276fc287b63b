"""Sort-free thresholds of top-k and top-p: the smallest score of each row that a filter keeps.

Top-k keeps a token if fewer than k tokens are likelier, top-p if the total probability of likelier tokens is below
top_p. A filter is therefore a search for the smallest kept score. Two passes over the vocabulary narrow its range of
scores to 1/225, a third pass collects the tokens in that range, and one program per row searches the collected tokens.
If few tokens are left, as after top-k, the first two passes are skipped. The probability masses of collected tokens are
integers, in units of 2^-40 of the likeliest token's mass, because their summation order varies (atomics).
:func:`.sampling.draw_reference` is the sorting reference implementation.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.kernels.triton.launch import Arguments, Launcher, next_power

_BLOCK = 4096
_ENDS = 16
"""Number of candidate lower ends of the range per pass; the last candidate is -inf, below every token."""
_PASSES = 2
_FEW = tl.constexpr(4096)
"""Up to this number of tokens, a row is searched without narrowing passes."""


def find_thresholds(
    source: tuple[Tensor, Tensor, Tensor | None],
    sizes: tuple[int, int, int],
    top_k: Tensor | None,
    top_p: Tensor | None,
    collected: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return (the smallest score that top-k and top-p keep, the highest score), [rows] float32 each.

    ``source`` is (logits [rows, vocab], temperatures, mask) as in :func:`.sampling.draw`. ``sizes`` is (vocab, row
    stride of logits, row stride of the mask). ``collected`` [rows, vocab] float32 is scratch space.
    """
    (rows, vocab), device = collected.shape, collected.device
    chunks = -(-vocab // _BLOCK)
    grid = rows, chunks, 1
    # separate tensors: Triton specializes on 16-byte alignment
    floors, max_scores, high, low = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(4))
    ends = torch.empty(rows, _ENDS, dtype=torch.float32, device=device)
    above, weights_above = (
        torch.empty(size, dtype=torch.int64, device=device) for size in (rows, rows * chunks * _ENDS)
    )
    limits = torch.empty(rows, dtype=torch.float64, device=device)
    kept, count = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(2))
    tops, bottoms = (torch.empty(rows, chunks, dtype=torch.float32, device=device) for _ in range(2))
    row_grid, block, padded = (rows, 1, 1), {"BLOCK": _BLOCK}, {"ENDS": _ENDS, "CHUNKS": next_power(chunks)}
    _launch_span(device, grid, (*source, tops, bottoms, *sizes), block, num_warps=8)
    args: Arguments = tops, bottoms, floors, max_scores, low, high, above, kept, count, ends, vocab, chunks
    _launch_start(device, row_grid, args, padded, num_warps=1)
    for values, is_mass in ((top_k, False), (top_p, True)):
        if values is None:
            continue
        filter_constant, state = {"IS_MASS": is_mass}, (source[1], values)
        for _ in range(_PASSES):
            args = *source, values, kept, floors, max_scores, ends, weights_above, *sizes
            _launch_hold(device, grid, args, filter_constant | {"ENDS": _ENDS} | block, num_warps=8)
            args = *state, kept, weights_above, ends, low, high, above, limits, vocab, chunks
            _launch_narrow(device, row_grid, args, filter_constant | padded, num_warps=4)
        args = *source, values, floors, low, high, count, collected, *sizes
        _launch_collect(device, grid, args, filter_constant | block, num_warps=8)
        args = *state, collected, kept, count, above, limits, max_scores, low, high, floors, ends, vocab
        _launch_search(device, row_grid, args, filter_constant | {"ENDS": _ENDS}, num_warps=8)
    return floors, max_scores


@triton.jit
def row_scores(logits, temperatures, mask, row, token, vocab, logits_row, mask_row):
    """Load scores (logits / temperature) of tokens of one row, -inf past the vocabulary and for masked tokens."""
    temperature = tl.load(temperatures + row)
    x = tl.load(logits + row * logits_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(token < vocab, tl.div_rn(x, tl.where(temperature > 0.0, temperature, 1.0)), float("-inf"))
    if mask is not None:
        word = tl.load(mask + row * mask_row + token // 32, mask=token < vocab, other=0)
        x = tl.where(((word >> (token % 32)) & 1) != 0, x, float("-inf"))
    return x


@triton.jit
def _key(x):
    """Map float32 values to 32-bit integers (in int64) of the same order; -0.0 maps like 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -1 - bits, bits + 0x80000000) & 0xFFFFFFFF


@triton.jit
def _value(key):
    """Return the float32 value of an integer key, the inverse of :func:`_key`."""
    bits = tl.where(key >= 0x80000000, key - 0x80000000, -1 - key).to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, max_score, IS_MASS: tl.constexpr):
    """Return the weight of tokens in a filter: 1 for top-k, exp(score - max_score) for top-p; float32."""
    return tl.exp(x - max_score) if IS_MASS else tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _units(weight, IS_MASS: tl.constexpr):
    """Convert weights to int64: a count, or with IS_MASS a mass in units of 2^-40."""
    return (weight * 1099511627776.0 if IS_MASS else weight).to(tl.int64)


@triton.jit
def _is_filtered(temperatures, values, row, vocab, IS_MASS: tl.constexpr):
    """Return whether the filter, top-k or top-p (IS_MASS), applies to a row."""
    value = tl.load(values + row)
    applies = value < 1.0 if IS_MASS else (value > 0) & (value < vocab)
    return applies & (tl.load(temperatures + row) > 0.0)


@triton.jit
def _store_ends(ends, row, low, high, ENDS: tl.constexpr):
    """Store ENDS candidate scores: equal steps from ``high`` down to ``low``, then -inf."""
    lane = tl.arange(0, ENDS)
    candidates = high - (high - low) * ((lane + 1).to(tl.float32) / (ENDS - 1))
    tl.store(ends + row * ENDS + lane, tl.where(lane == ENDS - 1, float("-inf"), candidates))


@triton.jit(do_not_specialize=["vocab"])
def _span_kernel(
    logits, temperatures, mask, tops, bottoms, vocab, logits_row, mask_row, BLOCK: tl.constexpr
):  # fmt: skip
    """Store the highest score (ignoring NaN) and the lowest score (ignoring -inf) of one chunk of a row."""
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    x = row_scores(logits, temperatures, mask, row, token, vocab, logits_row, mask_row)
    tl.store(tops + row * chunks + chunk, tl.max(tl.where(x == x, x, float("-inf")), 0))
    tl.store(bottoms + row * chunks + chunk, tl.min(tl.where(x > float("-inf"), x, float("inf")), 0))


@triton.jit(do_not_specialize=["vocab", "chunks"])
def _start_kernel(
    tops, bottoms, floors, max_scores, low, high, above, kept, count, ends, vocab, chunks,
    ENDS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Initialize the search of one row over all its scores; scores over 32 below the highest share one step."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    top = tl.max(tl.load(tops + row * chunks + chunk, mask=chunk < chunks, other=float("-inf")), 0)
    bottom = tl.min(tl.load(bottoms + row * chunks + chunk, mask=chunk < chunks, other=float("inf")), 0)
    tl.store(max_scores + row, top)
    tl.store(kept + row, vocab)
    _restart(floors, low, high, above, count, ends, row, float("-inf"), tl.maximum(bottom, top - 32.0), top, ENDS)


@triton.jit
def _restart(floors, low, high, above, count, ends, row, floor, bottom, top, ENDS: tl.constexpr):
    """Set the floor of a row and restart its search over all kept scores, with steps between ``bottom`` and ``top``."""
    tl.store(floors + row, floor)
    tl.store(low + row, float("-inf"))
    tl.store(high + row, top)
    tl.store(above + row, tl.zeros([], tl.int64))
    tl.store(count + row, 0)
    _store_ends(ends, row, bottom, top, ENDS)


@triton.jit(do_not_specialize=["vocab"])
def _hold_kernel(
    logits, temperatures, mask, values, kept, floors, max_scores, ends, weights_above, vocab, logits_row, mask_row,
    IS_MASS: tl.constexpr, ENDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the total weight of the kept tokens above each candidate end, for one chunk of a row."""
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if _is_filtered(temperatures, values, row, vocab, IS_MASS) & (tl.load(kept + row) > _FEW):
        floor, top, lane = tl.load(floors + row), tl.load(max_scores + row), tl.arange(0, ENDS)
        candidates = tl.load(ends + row * ENDS + lane)
        sums = tl.zeros([ENDS, 512], tl.float32)
        for start in range(0, BLOCK, 512):
            token = chunk * BLOCK + start + tl.arange(0, 512)
            x = row_scores(logits, temperatures, mask, row, token, vocab, logits_row, mask_row)
            weight = tl.where(x >= floor, _weight(x, top, IS_MASS), 0.0)
            sums += tl.where(x[None, :] > candidates[:, None], weight[None, :], 0.0)
        tl.store(weights_above + (row * chunks + chunk) * ENDS + lane, _units(tl.sum(sums, 1), IS_MASS))


@triton.jit(do_not_specialize=["vocab", "chunks"])
def _narrow_kernel(
    temperatures, values, kept, weights_above, ends, low, high, above, limits, vocab, chunks,
    IS_MASS: tl.constexpr, ENDS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Narrow the range of one row to the step that contains its smallest kept score.

    ``above`` becomes the total weight of the scores above the range.
    """
    row = tl.program_id(0).to(tl.int64)
    if _is_filtered(temperatures, values, row, vocab, IS_MASS) & (tl.load(kept + row) > _FEW):
        lane, chunk = tl.arange(0, ENDS), tl.arange(0, CHUNKS)
        candidates = tl.load(ends + row * ENDS + lane)
        offsets = (row * chunks + chunk)[:, None] * ENDS + lane[None, :]
        sums = tl.sum(tl.load(weights_above + offsets, mask=(chunk < chunks)[:, None], other=0), 0)
        limit = tl.load(values + row).to(tl.float64)
        if IS_MASS:
            limit *= tl.max(sums, 0).to(tl.float64)
        chosen = tl.min(tl.where((sums.to(tl.float64) >= limit), lane, ENDS - 1), 0)
        is_previous = lane == chosen - 1
        start, weight_above = tl.load(high + row), tl.load(above + row)
        start = tl.where(chosen == 0, start, tl.max(tl.where(is_previous, candidates, float("-inf")), 0))
        weight_above = tl.where(chosen == 0, weight_above, tl.sum(tl.where(is_previous, sums, 0), 0))
        end = tl.max(tl.where(lane == chosen, candidates, float("-inf")), 0)
        tl.store(low + row, end)
        tl.store(high + row, start)
        tl.store(above + row, weight_above)
        tl.store(limits + row, limit)
        _store_ends(ends, row, end, start, ENDS)


@triton.jit(do_not_specialize=["vocab"])
def _collect_kernel(
    logits, temperatures, mask, values, floors, low, high, count, collected, vocab, logits_row, mask_row,
    IS_MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Append the kept scores of one chunk that are in the row's range to ``collected``, in arbitrary order."""
    row = tl.program_id(0).to(tl.int64)
    if _is_filtered(temperatures, values, row, vocab, IS_MASS):
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        x = row_scores(logits, temperatures, mask, row, token, vocab, logits_row, mask_row)
        in_range = (x > tl.load(low + row)) & (x <= tl.load(high + row)) & (x >= tl.load(floors + row))
        rank = tl.cumsum(in_range.to(tl.int32), 0)
        first = tl.atomic_add(count + row, tl.sum(in_range.to(tl.int32), 0))
        tl.store(collected + row * vocab + first + rank - 1, x, mask=in_range)


@triton.jit
def _load_collected(collected, index, num, top, IS_MASS: tl.constexpr):
    """Load collected scores; return their keys and the integer weights of their tokens."""
    x = tl.load(collected + index, mask=index < num, other=float("-inf"))
    return _key(x), tl.where(index < num, _units(_weight(x, top, IS_MASS), IS_MASS), 0)


@triton.jit(do_not_specialize=["vocab"])
def _search_kernel(
    temperatures, values, collected, kept, count, above, limits, max_scores, low, high, floors, ends, vocab,
    IS_MASS: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """Find the smallest score of one row with less than the limit above it, three key bits per iteration."""
    row = tl.program_id(0).to(tl.int64)
    if _is_filtered(temperatures, values, row, vocab, IS_MASS):
        top, num, weight_above, index = (
            tl.load(max_scores + row),
            tl.load(count + row),
            tl.load(above + row),
            tl.arange(0, 512),
        )
        collected += row * vocab
        if tl.load(kept + row) > _FEW:
            limit = tl.load(limits + row)
        else:
            limit = tl.load(values + row).to(tl.float64)
            if IS_MASS:
                total = tl.zeros([512], tl.int64)
                for start in range(0, num, 512):
                    total += _load_collected(collected, start + index, num, top, IS_MASS)[1]
                limit *= tl.sum(total, 0).to(tl.float64)
        candidate = tl.arange(0, 8).to(tl.int64)
        threshold = _key(tl.load(low + row)) + 1
        width = _key(tl.load(high + row)) - threshold
        for step in range(11):
            size = tl.full([], 1, tl.int64) << (30 - 3 * step)
            if size <= width:
                last = threshold + (candidate + 1) * size - 1
                weights = tl.zeros([8, 512], tl.int64)
                for start in range(0, num, 512):
                    key, weight = _load_collected(collected, start + index, num, top, IS_MASS)
                    weights += tl.where(key[None, :] > last[:, None], weight[None, :], 0)
                cumulative = (weight_above + tl.sum(weights, 1)).to(tl.float64)
                threshold += tl.sum(((cumulative >= limit) & (candidate < 7)).to(tl.int64), 0) * size
        if IS_MASS:
            threshold = tl.minimum(threshold, _key(top))
        floor = tl.maximum(tl.load(floors + row), _value(threshold))
        if not IS_MASS:
            num_kept = tl.zeros([512], tl.int64)
            for start in range(0, num, 512):
                key, weight = _load_collected(collected, start + index, num, top, IS_MASS)
                num_kept += tl.where(key >= threshold, weight, 0)
            tl.store(kept + row, (weight_above + tl.sum(num_kept, 0)).to(tl.int32))
        tl.debug_barrier()  # all warps have read the state that is overwritten now
        _restart(floors, low, high, above, count, ends, row, floor, floor, top, ENDS)


_launch_span, _launch_start, _launch_hold = Launcher(_span_kernel), Launcher(_start_kernel), Launcher(_hold_kernel)
_launch_narrow, _launch_collect, _launch_search = (
    Launcher(kernel) for kernel in (_narrow_kernel, _collect_kernel, _search_kernel)
)
