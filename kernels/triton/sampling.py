"""Sampling on the device: temperature, filters, and a draw that depends only on the request's seed and position.

    scores = logits / temperature                        unchanged at temperature 0
    filters: mask, then top-k, top-p, min-p              order of transformers' logits warpers; ties are kept
    token = argmax(scores + noise)                       Gumbel-max, arXiv:1611.01144; without noise at temperature 0

The noise is that of :mod:`tapscope.engine.sampling.gumbel`: MurmurHash3_x86_32 (Appleby, public domain) over the words
seed's low half, its high half, position and token id, u = (hash + 1/2) / 2^32, -log(-log(1 - u)). There is no host
synchronization and no sort: top-k and top-p keep the scores from a threshold on (:mod:`.thresholds`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.launch import Launcher, check_same_device, next_power
from tapscope.kernels.triton.thresholds import find_thresholds, row_scores

_BLOCK = 1024
"""Tokens per program. After filters, few programs have a token left; the other programs need no noise."""
_GREEDY_BLOCK = 4096
_WORD = (1 << 32) - 1


def noise_reference(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Return the Gumbel noise [rows, vocab] float32 for ``seeds`` and ``positions`` [rows] int64, in plain PyTorch."""
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
    """Compute :func:`draw` in plain PyTorch, by sorting."""
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
    """Sample one token per row of ``logits`` [rows, vocab].

    Returns (tokens [rows] int64, the filtered scores [rows, vocab] float32). ``temperature``, ``top_p`` (1 disables it)
    and ``min_p`` (0 disables it) are [rows] float32, ``top_k`` (0 disables it) is [rows] int32, ``seeds`` and
    ``positions`` are [rows] int64. ``mask`` [rows, vocab / 32] int32 has a set bit for every allowed token. At
    temperature 0, the likeliest token is returned and top-k, top-p and min-p are ignored. The lowest id wins ties. For
    a row of NaN, the first NaN is returned. Raises UsageError for inconsistent tensors.
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
    floors = max_scores = None
    if any(limit is not None for limit in filters.values()):
        floors, max_scores = find_thresholds(source, sizes, top_k, top_p, scores)
    parts = -(-vocab // _BLOCK)
    best = torch.empty(rows, parts, dtype=torch.float32, device=device)
    where = torch.empty(rows, parts, dtype=torch.int32, device=device)
    args = *source, seeds, positions, min_p, floors, max_scores, scores, best, where, *sizes
    _launch_draw(device, (rows, parts, 1), args, {"BLOCK": _BLOCK}, num_warps=4)
    block = {"BLOCK": next_power(parts)}
    _launch_choose(device, (rows, 1, 1), (best, where, tokens, parts), block, num_warps=1)
    return tokens, scores


def greedy(logits: Tensor) -> Tensor:
    """Return the likeliest token of each row of ``logits`` [rows, vocab], [rows] int64, like ``logits.argmax(-1)``.

    The lowest id wins ties; a row with NaN returns its first NaN. Raises UsageError for another shape.
    """
    _check(logits, {}, None)
    (rows, vocab), device = logits.shape, logits.device
    tokens, parts = torch.empty(rows, dtype=torch.int64, device=device), -(-vocab // _GREEDY_BLOCK)
    if not rows:
        return tokens
    best = torch.empty(rows, parts, dtype=torch.float32, device=device)
    where = torch.empty(rows, parts, dtype=torch.int32, device=device)
    args = logits, best, where, vocab, logits.stride(0)
    _launch_greedy(device, (rows, parts, 1), args, {"BLOCK": _GREEDY_BLOCK}, num_warps=4)
    block = {"BLOCK": next_power(parts)}
    _launch_choose(device, (rows, 1, 1), (best, where, tokens, parts), block, num_warps=1)
    return tokens


_TYPES = {"seeds": torch.int64, "positions": torch.int64, "top_k": torch.int32}


def _check(logits: Tensor, vectors: dict[str, Tensor | None], mask: Tensor | None) -> None:
    """Raise UsageError for inconsistent shapes, dtypes, strides or devices."""
    check_same_device(logits, mask, *vectors.values())
    if logits.ndim != 2 or not logits.shape[1] or (logits.stride(1) != 1 and logits.shape[1] > 1):
        raise UsageError(f"logits {list(logits.shape)}: expected [rows, vocab] with contiguous rows")
    for name, vector in vectors.items():
        dtype = _TYPES.get(name, torch.float32)
        if vector is not None and (vector.shape != logits.shape[:1] or vector.dtype != dtype):
            raise UsageError(f"{name} is {vector.dtype} {list(vector.shape)}; expected {dtype} [{len(logits)}]")
        if vector is not None and not vector.is_contiguous():
            raise UsageError(f"{name} must be contiguous")
    if mask is not None and (mask.dtype != torch.int32 or mask.shape != (len(logits), -(-logits.shape[1] // 32))):
        raise UsageError(f"mask is {mask.dtype} {list(mask.shape)}; expected int32 with one bit per token")
    if mask is not None and mask.stride(1) != 1:
        raise UsageError("mask must have contiguous rows")


@triton.jit
def _hash_word(state, word):
    """Update the MurmurHash3 state (uint32) with one word."""
    word *= 0xCC9E2D51
    word = ((word << 15) | (word >> 17)) * 0x1B873593
    state ^= word
    return ((state << 13) | (state >> 19)) * 5 + 0xE6546B64


@triton.jit
def _noise(seed, position, token):
    """Return the Gumbel noise of tokens (int32) for a seed and a position (int64)."""
    state = (seed & 0).to(tl.uint32)
    state = _hash_word(state, (seed & 0xFFFFFFFF).to(tl.uint32))
    state = _hash_word(state, ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    state = _hash_word(state, (position & 0xFFFFFFFF).to(tl.uint32))
    state = _hash_word(state, token.to(tl.uint32)) ^ 16
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    state = state ^ (state >> 16)
    u = tl.minimum(state.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994)
    # -log(1 - u): by its series near 0, where the winning tokens are
    series = 0.125 + u * (0.11111111 + u * 0.1)
    series = u * (0.2 + u * (0.16666667 + u * (0.14285715 + u * series)))
    series = u + u * u * (0.5 + u * (0.33333334 + u * (0.25 + series)))
    return -tl.log(tl.where(u < 0.0625, series, -tl.log(1.0 - u)))


@triton.jit(do_not_specialize=["vocab"])
def _draw_kernel(
    logits, temperatures, mask, seeds, positions, min_p, floors, max_scores, scores, best, where, vocab, logits_row,
    mask_row, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the filtered scores of one chunk of a row, and the chunk's best token by score plus noise."""
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature, seed, position = tl.load(temperatures + row), tl.load(seeds + row), tl.load(positions + row)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    x = row_scores(logits, temperatures, mask, row, token, vocab, logits_row, mask_row)
    if floors is not None:
        floor = tl.load(floors + row)
        if min_p is not None:
            share = tl.load(min_p + row)
            min_score = tl.load(max_scores + row) + tl.log(share)
            floor = tl.maximum(floor, tl.where((share > 0.0) & (temperature > 0.0), min_score, float("-inf")))
        x = tl.where(x < floor, float("-inf"), x)
    tl.store(scores + row * vocab + token, x, mask=token < vocab)
    if (temperature > 0.0) & (tl.max(x, 0) > float("-inf")):
        x += _noise(seed, position, token)
    _store_best(x, token, vocab, best + row * chunks + chunk, where + row * chunks + chunk)


@triton.jit
def _store_best(x, token, vocab, best, where):
    """Store the highest score of a chunk, with NaN as infinity, and the lowest token with that score."""
    x = tl.where(x != x, float("inf"), x)
    x = tl.where(token < vocab, x, float("-inf"))
    top = tl.max(x, 0)
    tl.store(best, top)
    tl.store(where, tl.min(tl.where((x == top) & (token < vocab), token, 2147483647), 0))


@triton.jit(do_not_specialize=["vocab"])
def _greedy_kernel(logits, best, where, vocab, logits_row, BLOCK: tl.constexpr):
    """Store the highest logit of one chunk of a row and its token."""
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * logits_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x == float("inf"), 3.4028234663852886e38, x)  # ranks below NaN
    _store_best(x, token, vocab, best + row * chunks + chunk, where + row * chunks + chunk)


@triton.jit(do_not_specialize=["parts"])
def _choose_kernel(best, where, tokens, parts, BLOCK: tl.constexpr):
    """Store the token of one row, the best of its chunks."""
    row, part = tl.program_id(0), tl.arange(0, BLOCK)
    top = tl.load(best + row * parts + part, mask=part < parts, other=float("-inf"))
    token = tl.load(where + row * parts + part, mask=part < parts, other=2147483647)
    tl.store(tokens + row, tl.min(tl.where(top == tl.max(top, 0), token, 2147483647), 0).to(tl.int64))


_launch_draw, _launch_choose = Launcher(_draw_kernel), Launcher(_choose_kernel)
_launch_greedy = Launcher(_greedy_kernel)
