"""Thresholds of top-k and top-p: the least score of each row that is kept, without sorting.

A token is kept by top-k if fewer than k tokens are likelier, by top-p if the likelier ones hold less than top_p
together. So a filter is a search for the least score that is kept: two passes over the vocabulary narrow the range of
scores that contains it to 1/225, a third collects the tokens in that range, and one program a row searches them. Where
few tokens are left, as after top-k, the first two passes are skipped. Masses of collected tokens are integers,
multiples of 2^-40 of the likeliest token's, because the order of their sum varies. :func:`.sampling.draw_reference` is
the plain reference, by sorting.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.kernels.triton.launch import Arguments, Launcher, next_power

_BLOCK = 4096
_ENDS = 16
"""How many scores a pass tries as the end of the range; the last is -inf, which every token is above."""
_PASSES = 2
_FEW = tl.constexpr(4096)
"""Up to this many tokens of a row are searched without narrowing the range first."""


def find_thresholds(
    source: tuple[Tensor, Tensor, Tensor | None],
    sizes: tuple[int, int, int],
    top_k: Tensor | None,
    top_p: Tensor | None,
    found: Tensor,
) -> tuple[Tensor, Tensor]:
    """The least score that top-k and top-p keep, and the highest score: [rows] float32 each.

    ``source``: logits [rows, vocab], temperatures and mask as :func:`.sampling.draw` takes them. ``sizes``: vocab, and
    the row strides of logits and mask. ``found`` [rows, vocab] float32 is overwritten.
    """
    (rows, vocab), device = found.shape, found.device
    chunks = -(-vocab // _BLOCK)
    grid = rows, chunks, 1
    # a tensor each: Triton recompiles for addresses that are not multiples of 16
    floors, most, high, low = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(4))
    ends = torch.empty(rows, _ENDS, dtype=torch.float32, device=device)
    above, held = (torch.empty(size, dtype=torch.int64, device=device) for size in (rows, rows * chunks * _ENDS))
    limits = torch.empty(rows, dtype=torch.float64, device=device)
    kept, count = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(2))
    tops, bottoms = (torch.empty(rows, chunks, dtype=torch.float32, device=device) for _ in range(2))
    each, block, padded = (rows, 1, 1), {"BLOCK": _BLOCK}, {"ENDS": _ENDS, "CHUNKS": next_power(chunks)}
    _launch_span(device, grid, (*source, tops, bottoms, *sizes), block, num_warps=8)
    args: Arguments = tops, bottoms, floors, most, low, high, above, kept, count, ends, vocab, chunks
    _launch_start(device, each, args, padded, num_warps=1)
    for values, is_mass in ((top_k, False), (top_p, True)):
        if values is None:
            continue
        kind, state = {"IS_MASS": is_mass}, (source[1], values)
        for _ in range(_PASSES):
            args = *source, values, kept, floors, most, ends, held, *sizes
            _launch_hold(device, grid, args, kind | {"ENDS": _ENDS} | block, num_warps=8)
            args = *state, kept, held, ends, low, high, above, limits, vocab, chunks
            _launch_narrow(device, each, args, kind | padded, num_warps=4)
        args = *source, values, floors, low, high, count, found, *sizes
        _launch_collect(device, grid, args, kind | block, num_warps=8)
        args = *state, found, kept, count, above, limits, most, low, high, floors, ends, vocab
        _launch_search(device, each, args, kind | {"ENDS": _ENDS}, num_warps=8)
    return floors, most


@triton.jit
def row_scores(logits, temperatures, mask, row, token, vocab, logits_row, mask_row):
    """Scores of tokens of one row; -inf beyond the vocabulary and for tokens that the mask forbids."""
    temperature = tl.load(temperatures + row)
    x = tl.load(logits + row * logits_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(token < vocab, tl.div_rn(x, tl.where(temperature > 0.0, temperature, 1.0)), float("-inf"))
    if mask is not None:
        word = tl.load(mask + row * mask_row + token // 32, mask=token < vocab, other=0)
        x = tl.where(((word >> (token % 32)) & 1) != 0, x, float("-inf"))
    return x


@triton.jit
def _key(x):
    """Float32 numbers as int64 of 32 bits, in the same order; minus zero as zero."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -1 - bits, bits + 0x80000000) & 0xFFFFFFFF


@triton.jit
def _number(key):
    """The number of a key."""
    bits = tl.where(key >= 0x80000000, key - 0x80000000, -1 - key).to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _share(x, most, IS_MASS: tl.constexpr):
    """What tokens hold: one each, or exp(score - highest); float32."""
    return tl.exp(x - most) if IS_MASS else tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _units(held, IS_MASS: tl.constexpr):
    """What tokens hold as int64: their number, or their mass in units of 2^-40."""
    return (held * 1099511627776.0 if IS_MASS else held).to(tl.int64)


@triton.jit
def _is_filtered(temperatures, values, row, vocab, IS_MASS: tl.constexpr):
    """Whether a filter, top-k or top-p, applies to a row."""
    value = tl.load(values + row)
    applies = value < 1.0 if IS_MASS else (value > 0) & (value < vocab)
    return applies & (tl.load(temperatures + row) > 0.0)


@triton.jit
def _store_ends(ends, row, low, high, ENDS: tl.constexpr):
    """Scores from ``high`` down to ``low`` in equal steps, and -inf."""
    lane = tl.arange(0, ENDS)
    each = high - (high - low) * ((lane + 1).to(tl.float32) / (ENDS - 1))
    tl.store(ends + row * ENDS + lane, tl.where(lane == ENDS - 1, float("-inf"), each))


@triton.jit(do_not_specialize=["vocab"])
def _span_kernel(
    logits, temperatures, mask, tops, bottoms, vocab, logits_row, mask_row, BLOCK: tl.constexpr
):  # fmt: skip
    """The highest and the least score of one chunk of a row, infinities aside."""
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    x = row_scores(logits, temperatures, mask, row, token, vocab, logits_row, mask_row)
    tl.store(tops + row * chunks + chunk, tl.max(tl.where(x == x, x, float("-inf")), 0))
    tl.store(bottoms + row * chunks + chunk, tl.min(tl.where(x > float("-inf"), x, float("inf")), 0))


@triton.jit(do_not_specialize=["vocab", "chunks"])
def _start_kernel(
    tops, bottoms, floors, most, low, high, above, kept, count, ends, vocab, chunks,
    ENDS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Everything is kept yet: the range of one row's scores; what is more than 32 below the highest is one step."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    top = tl.max(tl.load(tops + row * chunks + chunk, mask=chunk < chunks, other=float("-inf")), 0)
    bottom = tl.min(tl.load(bottoms + row * chunks + chunk, mask=chunk < chunks, other=float("inf")), 0)
    tl.store(most + row, top)
    tl.store(kept + row, vocab)
    _restart(floors, low, high, above, count, ends, row, float("-inf"), tl.maximum(bottom, top - 32.0), top, ENDS)


@triton.jit
def _restart(floors, low, high, above, count, ends, row, floor, bottom, top, ENDS: tl.constexpr):
    """Keep what is not below ``floor``: the next search is of all of it, from steps between ``bottom`` and ``top``."""
    tl.store(floors + row, floor)
    tl.store(low + row, float("-inf"))
    tl.store(high + row, top)
    tl.store(above + row, tl.zeros([], tl.int64))
    tl.store(count + row, 0)
    _store_ends(ends, row, bottom, top, ENDS)


@triton.jit(do_not_specialize=["vocab"])
def _hold_kernel(
    logits, temperatures, mask, values, kept, floors, most, ends, held, vocab, logits_row, mask_row,
    IS_MASS: tl.constexpr, ENDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What the kept tokens of one chunk above each end hold."""
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if _is_filtered(temperatures, values, row, vocab, IS_MASS) & (tl.load(kept + row) > _FEW):
        floor, top, lane = tl.load(floors + row), tl.load(most + row), tl.arange(0, ENDS)
        each = tl.load(ends + row * ENDS + lane)
        sums = tl.zeros([ENDS, 512], tl.float32)
        for start in range(0, BLOCK, 512):
            token = chunk * BLOCK + start + tl.arange(0, 512)
            x = row_scores(logits, temperatures, mask, row, token, vocab, logits_row, mask_row)
            share = tl.where(x >= floor, _share(x, top, IS_MASS), 0.0)
            sums += tl.where(x[None, :] > each[:, None], share[None, :], 0.0)
        tl.store(held + (row * chunks + chunk) * ENDS + lane, _units(tl.sum(sums, 1), IS_MASS))


@triton.jit(do_not_specialize=["vocab", "chunks"])
def _narrow_kernel(
    temperatures, values, kept, held, ends, low, high, above, limits, vocab, chunks,
    IS_MASS: tl.constexpr, ENDS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The step that contains the least kept score of one row is the next range; ``above`` is what scores above hold."""
    row = tl.program_id(0).to(tl.int64)
    if _is_filtered(temperatures, values, row, vocab, IS_MASS) & (tl.load(kept + row) > _FEW):
        lane, chunk = tl.arange(0, ENDS), tl.arange(0, CHUNKS)
        each = tl.load(ends + row * ENDS + lane)
        places = (row * chunks + chunk)[:, None] * ENDS + lane[None, :]
        sums = tl.sum(tl.load(held + places, mask=(chunk < chunks)[:, None], other=0), 0)
        limit = tl.load(values + row).to(tl.float64)
        if IS_MASS:
            limit *= tl.max(sums, 0).to(tl.float64)
        chosen = tl.min(tl.where((sums.to(tl.float64) >= limit), lane, ENDS - 1), 0)
        before = lane == chosen - 1
        start, over = tl.load(high + row), tl.load(above + row)
        start = tl.where(chosen == 0, start, tl.max(tl.where(before, each, float("-inf")), 0))
        over = tl.where(chosen == 0, over, tl.sum(tl.where(before, sums, 0), 0))
        end = tl.max(tl.where(lane == chosen, each, float("-inf")), 0)
        tl.store(low + row, end)
        tl.store(high + row, start)
        tl.store(above + row, over)
        tl.store(limits + row, limit)
        _store_ends(ends, row, end, start, ENDS)


@triton.jit(do_not_specialize=["vocab"])
def _collect_kernel(
    logits, temperatures, mask, values, floors, low, high, count, found, vocab, logits_row, mask_row,
    IS_MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The kept scores of one chunk that are in the row's range, in any order."""
    row = tl.program_id(0).to(tl.int64)
    if _is_filtered(temperatures, values, row, vocab, IS_MASS):
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        x = row_scores(logits, temperatures, mask, row, token, vocab, logits_row, mask_row)
        inside = (x > tl.load(low + row)) & (x <= tl.load(high + row)) & (x >= tl.load(floors + row))
        place = tl.cumsum(inside.to(tl.int32), 0)
        first = tl.atomic_add(count + row, tl.sum(inside.to(tl.int32), 0))
        tl.store(found + row * vocab + first + place - 1, x, mask=inside)


@triton.jit
def _found(found, place, num, top, IS_MASS: tl.constexpr):
    """Keys of collected scores, and what their tokens hold."""
    x = tl.load(found + place, mask=place < num, other=float("-inf"))
    return _key(x), tl.where(place < num, _units(_share(x, top, IS_MASS), IS_MASS), 0)


@triton.jit(do_not_specialize=["vocab"])
def _search_kernel(
    temperatures, values, found, kept, count, above, limits, most, low, high, floors, ends, vocab,
    IS_MASS: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """The least score of one row such that what is above holds less than the limit; three bits of its key at a time."""
    row = tl.program_id(0).to(tl.int64)
    if _is_filtered(temperatures, values, row, vocab, IS_MASS):
        top, num, before, place = tl.load(most + row), tl.load(count + row), tl.load(above + row), tl.arange(0, 512)
        found += row * vocab
        if tl.load(kept + row) > _FEW:
            limit = tl.load(limits + row)
        else:
            limit = tl.load(values + row).to(tl.float64)
            if IS_MASS:
                whole = tl.zeros([512], tl.int64)
                for start in range(0, num, 512):
                    whole += _found(found, start + place, num, top, IS_MASS)[1]
                limit *= tl.sum(whole, 0).to(tl.float64)
        candidate = tl.arange(0, 8).to(tl.int64)
        least = _key(tl.load(low + row)) + 1
        width = _key(tl.load(high + row)) - least
        for step in range(11):
            size = tl.full([], 1, tl.int64) << (30 - 3 * step)
            if size <= width:
                last = least + (candidate + 1) * size - 1
                held = tl.zeros([8, 512], tl.int64)
                for start in range(0, num, 512):
                    key, share = _found(found, start + place, num, top, IS_MASS)
                    held += tl.where(key[None, :] > last[:, None], share[None, :], 0)
                over = (before + tl.sum(held, 1)).to(tl.float64)
                least += tl.sum(((over >= limit) & (candidate < 7)).to(tl.int64), 0) * size
        if IS_MASS:
            least = tl.minimum(least, _key(top))
        floor = tl.maximum(tl.load(floors + row), _number(least))
        if not IS_MASS:
            num_kept = tl.zeros([512], tl.int64)
            for start in range(0, num, 512):
                key, share = _found(found, start + place, num, top, IS_MASS)
                num_kept += tl.where(key >= least, share, 0)
            tl.store(kept + row, (before + tl.sum(num_kept, 0)).to(tl.int32))
        tl.debug_barrier()  # every warp has read what is written now
        _restart(floors, low, high, above, count, ends, row, floor, floor, top, ENDS)


_launch_span, _launch_start, _launch_hold = Launcher(_span_kernel), Launcher(_start_kernel), Launcher(_hold_kernel)
_launch_narrow, _launch_collect, _launch_search = (
    Launcher(kernel) for kernel in (_narrow_kernel, _collect_kernel, _search_kernel)
)
