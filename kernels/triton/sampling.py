"""From logits to tokens on the device: temperature, filters and a draw that depends on a request alone.

    scores = logits / temperature                        as they are where the temperature is 0
    out: what the mask forbids; by top-k, top-p, min-p   transformers' logits warpers, in this order; ties are kept
    token = argmax(scores + noise)                       Gumbel-max, arXiv:1611.01144; without noise at temperature 0

The noise is that of :mod:`tapscope.engine.sampling.gumbel`: MurmurHash3_x86_32 (Appleby, public domain) over the words
seed's low half, its high half, position and token id, u = (hash + 1/2) / 2^32, -log(-log(1 - u)). Nothing is read on
the host and nothing is sorted. A token is kept by top-k if fewer than k tokens are likelier, by top-p if the likelier
ones hold less than top_p together, so a filter is a search for the least score that is kept: two passes over the
vocabulary narrow the range of scores that contains it to 1/225, a third collects the tokens in that range, and one
program a row searches them. Where few tokens are left, as after top-k, the first two passes are skipped. Masses of
collected tokens are integers, multiples of 2^-40 of the likeliest token's, because the order of their sum varies.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.launch import Arguments, Launcher, check_same_device, next_power

_BLOCK = 4096
_DRAWN = 1024
"""Tokens of a program that draws: few of them hold a token that filters keep, the others need no noise."""
_ENDS = 16
"""How many scores a pass tries as the end of the range; the last is -inf, which every token is above."""
_PASSES = 2
_FEW = tl.constexpr(4096)
"""Up to this many tokens of a row are searched without narrowing the range first."""
_WORD = (1 << 32) - 1


def noise_reference(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Gumbel noise [rows, vocab] float32 for seeds and positions [rows] int64."""
    state = torch.zeros(len(seeds), 1, dtype=torch.int64, device=seeds.device)
    tokens = torch.arange(vocab, device=seeds.device)[None]
    for word in (seeds[:, None] & _WORD, (seeds[:, None] >> 32) & _WORD, positions[:, None] & _WORD, tokens):
        mixed = word * 0xCC9E2D51 & _WORD
        mixed = ((mixed << 15 | mixed >> 17) & _WORD) * 0x1B873593 & _WORD
        state = state ^ mixed
        state = ((state << 13 | state >> 19) & _WORD) * 5 + 0xE6546B64 & _WORD
    state = state ^ 16
    state = (state ^ state >> 16) * 0x85EBCA6B & _WORD
    state = (state ^ state >> 13) * 0xC2B2AE35 & _WORD
    uniform = ((state ^ state >> 16).float() * 2.0**-32 + 2.0**-33).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def draw_reference(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What :func:`draw` computes, by sorting."""
    drawn = temperature[:, None] > 0
    scores = logits.float() / torch.where(drawn, temperature[:, None], 1.0)
    if mask is not None:
        bits = mask[:, :, None] >> torch.arange(32, device=mask.device, dtype=torch.int32) & 1
        scores = scores.masked_fill(bits.flatten(1)[:, : scores.shape[1]] == 0, -torch.inf)
    ordered, order = scores.sort(dim=-1, descending=True)
    for limit, is_mass in ((top_k, False), (top_p, True)):
        if limit is not None:
            share = ordered.softmax(-1, dtype=torch.float64) if is_mass else torch.ones_like(ordered)
            before = share.cumsum(-1) - share
            kept = before < limit[:, None] if is_mass else (before < limit[:, None]) | (limit[:, None] <= 0)
            kept[:, :1] = True
            floor = ordered.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
            out = (ordered < floor) & drawn & ((limit[:, None] < 1) if is_mass else (limit[:, None] > 0))
            ordered = ordered.masked_fill(out, -torch.inf)
    scores = torch.empty_like(scores).scatter_(1, order, ordered)
    if min_p is not None:
        floor = scores.amax(-1, keepdim=True) + min_p.log()[:, None]
        scores = scores.masked_fill((scores < floor) & drawn, -torch.inf)
    noise = torch.where(drawn, noise_reference(seeds, positions, scores.shape[1]), 0.0)
    return (scores + noise).argmax(-1), scores


def draw(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Logits [rows, vocab] -> (tokens [rows] int64, the scores they were drawn from [rows, vocab] float32).

    ``temperature``, ``top_p`` (1 keeps all) and ``min_p`` (0 keeps all) are [rows] float32, ``top_k`` (0 keeps all) is
    [rows] int32; ``seeds`` and ``positions`` are [rows] int64. ``mask`` [rows, vocab / 32] int32 has a bit for every
    token that is allowed. At temperature 0 the likeliest token is taken and the filters do nothing. The lowest id wins
    a tie. A row of NaN gives its first NaN. Raises UsageError for tensors that do not fit together.
    """
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    _check(logits, {"temperature": temperature, "seeds": seeds, "positions": positions, **filters}, mask)
    (rows, vocab), device = logits.shape, logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    scores = torch.empty(rows, vocab, dtype=torch.float32, device=device)
    if not rows:
        return tokens, scores
    source = logits, temperature, mask
    sizes = vocab, logits.stride(0), 0 if mask is None else mask.stride(0)
    grid = rows, -(-vocab // _BLOCK), 1
    floors = most = None
    if any(limit is not None for limit in filters.values()):
        floors, most = _find_floors(source, sizes, grid, top_k, top_p, scores)
    parts = -(-vocab // _DRAWN)
    best = torch.empty(rows, parts, dtype=torch.float32, device=device)
    where = torch.empty(rows, parts, dtype=torch.int32, device=device)
    args = *source, seeds, positions, min_p, floors, most, scores, best, where, *sizes
    _launch_draw(device, (rows, parts, 1), args, {"BLOCK": _DRAWN}, num_warps=4)
    block = {"BLOCK": next_power(parts)}
    _launch_choose(device, (rows, 1, 1), (best, where, tokens, parts), block, num_warps=1)
    return tokens, scores


def _find_floors(
    source: tuple[Tensor, Tensor, Tensor | None],
    sizes: tuple[int, int, int],
    grid: tuple[int, int, int],
    top_k: Tensor | None,
    top_p: Tensor | None,
    found: Tensor,
) -> tuple[Tensor, Tensor]:
    """The least score that top-k and top-p keep, and the highest score: [rows] float32 each.

    ``source`` are logits, temperatures and mask; ``found`` [rows, vocab] float32 is overwritten.
    """
    (rows, chunks, _), device = grid, found.device
    # a tensor each: Triton recompiles for addresses that are not multiples of 16
    floors, most, high, low = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(4))
    ends = torch.empty(rows, _ENDS, dtype=torch.float32, device=device)
    above, held = (torch.empty(size, dtype=torch.int64, device=device) for size in (rows, rows * chunks * _ENDS))
    limits = torch.empty(rows, dtype=torch.float64, device=device)
    kept, count = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(2))
    tops, bottoms = (torch.empty(rows, chunks, dtype=torch.float32, device=device) for _ in range(2))
    each, block, padded = (rows, 1, 1), {"BLOCK": _BLOCK}, {"ENDS": _ENDS, "CHUNKS": next_power(chunks)}
    _launch_span(device, grid, (*source, tops, bottoms, *sizes), block, num_warps=8)
    args: Arguments = tops, bottoms, floors, most, low, high, above, kept, count, ends, sizes[0], chunks
    _launch_start(device, each, args, padded, num_warps=1)
    for values, is_mass in ((top_k, False), (top_p, True)):
        if values is None:
            continue
        kind, state = {"IS_MASS": is_mass}, (source[1], values)
        for _ in range(_PASSES):
            args = *source, values, kept, floors, most, ends, held, *sizes
            _launch_hold(device, grid, args, kind | {"ENDS": _ENDS} | block, num_warps=8)
            args = *state, kept, held, ends, low, high, above, limits, sizes[0], chunks
            _launch_narrow(device, each, args, kind | padded, num_warps=4)
        args = *source, values, floors, low, high, count, found, *sizes
        _launch_collect(device, grid, args, kind | block, num_warps=8)
        args = *state, found, kept, count, above, limits, most, low, high, floors, ends, sizes[0]
        _launch_search(device, each, args, kind | {"ENDS": _ENDS}, num_warps=8)
    return floors, most


_TYPES = {"seeds": torch.int64, "positions": torch.int64, "top_k": torch.int32}


def _check(logits: Tensor, vectors: dict[str, Tensor | None], mask: Tensor | None) -> None:
    """Raise UsageError for tensors that do not fit together."""
    check_same_device(logits, mask, *vectors.values())
    if logits.ndim != 2 or not logits.shape[1] or (logits.stride(1) != 1 and logits.shape[1] > 1):
        raise UsageError(f"logits {list(logits.shape)}: [rows, vocab] with contiguous rows are needed")
    for name, vector in vectors.items():
        dtype = _TYPES.get(name, torch.float32)
        if vector is not None and (vector.shape != logits.shape[:1] or vector.dtype != dtype):
            raise UsageError(f"{name} is {vector.dtype} {list(vector.shape)}; {dtype} [{len(logits)}] is needed")
        if vector is not None and not vector.is_contiguous():
            raise UsageError(f"{name} is to be contiguous")
    if mask is not None and (mask.dtype != torch.int32 or mask.shape != (len(logits), -(-logits.shape[1] // 32))):
        raise UsageError(f"mask is {mask.dtype} {list(mask.shape)}; a bit of int32 for each token is needed")
    if mask is not None and mask.stride(1) != 1:
        raise UsageError("mask is to have contiguous rows")


@triton.jit
def _scores(logits, temperatures, mask, row, token, vocab, logits_row, mask_row):
    """Scores of tokens of one row; -inf where there is no token or the mask forbids it."""
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
    x = _scores(logits, temperatures, mask, row, token, vocab, logits_row, mask_row)
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
            x = _scores(logits, temperatures, mask, row, token, vocab, logits_row, mask_row)
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
        x = _scores(logits, temperatures, mask, row, token, vocab, logits_row, mask_row)
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


@triton.jit
def _hashed(state, word):
    """MurmurHash3's state after one more word; uint32."""
    word *= 0xCC9E2D51
    word = ((word << 15) | (word >> 17)) * 0x1B873593
    state ^= word
    return ((state << 13) | (state >> 19)) * 5 + 0xE6546B64


@triton.jit
def _noise(seed, position, token):
    """Gumbel noise of tokens (int32) for a seed and a position (int64)."""
    state = (seed & 0).to(tl.uint32)
    state = _hashed(state, (seed & 0xFFFFFFFF).to(tl.uint32))
    state = _hashed(state, ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    state = _hashed(state, (position & 0xFFFFFFFF).to(tl.uint32))
    state = _hashed(state, token.to(tl.uint32)) ^ 16
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    state = state ^ (state >> 16)
    u = tl.minimum(state.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994)
    # -log(1 - u): near 0, where the winners are, by its series
    series = 0.125 + u * (0.11111111 + u * 0.1)
    series = u * (0.2 + u * (0.16666667 + u * (0.14285715 + u * series)))
    series = u + u * u * (0.5 + u * (0.33333334 + u * (0.25 + series)))
    return -tl.log(tl.where(u < 0.0625, series, -tl.log(1.0 - u)))


@triton.jit(do_not_specialize=["vocab"])
def _draw_kernel(
    logits, temperatures, mask, seeds, positions, min_p, floors, most, scores, best, where, vocab, logits_row, mask_row,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The scores of one chunk of a row, and where score and noise are highest in it."""
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature, seed, position = tl.load(temperatures + row), tl.load(seeds + row), tl.load(positions + row)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    x = _scores(logits, temperatures, mask, row, token, vocab, logits_row, mask_row)
    if floors is not None:
        floor = tl.load(floors + row)
        if min_p is not None:
            share = tl.load(min_p + row)
            least = tl.load(most + row) + tl.log(share)
            floor = tl.maximum(floor, tl.where((share > 0.0) & (temperature > 0.0), least, float("-inf")))
        x = tl.where(x < floor, float("-inf"), x)
    tl.store(scores + row * vocab + token, x, mask=token < vocab)
    if (temperature > 0.0) & (tl.max(x, 0) > float("-inf")):
        x += _noise(seed, position, token)
    x = tl.where(x != x, float("inf"), x)
    x = tl.where(token < vocab, x, float("-inf"))
    top = tl.max(x, 0)
    tl.store(best + row * chunks + chunk, top)
    tl.store(where + row * chunks + chunk, tl.min(tl.where((x == top) & (token < vocab), token, 2147483647), 0))


@triton.jit(do_not_specialize=["parts"])
def _choose_kernel(best, where, tokens, parts, BLOCK: tl.constexpr):
    """The token of one row: the best of its parts."""
    row, part = tl.program_id(0), tl.arange(0, BLOCK)
    top = tl.load(best + row * parts + part, mask=part < parts, other=float("-inf"))
    place = tl.load(where + row * parts + part, mask=part < parts, other=2147483647)
    tl.store(tokens + row, tl.min(tl.where(top == tl.max(top, 0), place, 2147483647), 0).to(tl.int64))


_launch_span, _launch_start, _launch_hold, _launch_narrow = (
    Launcher(kernel) for kernel in (_span_kernel, _start_kernel, _hold_kernel, _narrow_kernel)
)
_launch_collect, _launch_search, _launch_draw, _launch_choose = (
    Launcher(kernel) for kernel in (_collect_kernel, _search_kernel, _draw_kernel, _choose_kernel)
)
