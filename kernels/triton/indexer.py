"""Sparse attention's choice of keys in decoding (DSA, arXiv:2512.02556 section 2): one row a request, keys in pages.

For request b, with index heads h:

    score[t] = sum_h weight[b, h] * relu(query[b, h] . key[t])       t = 0 .. length - 1
    chosen[b] = the top_k positions with the highest scores, the first ones among equal scores, ascending

Position t of request b is in page page_table[b, t // page_size] at t % page_size. Grids depend on shapes alone, so a
CUDA graph may capture both kernels; lengths are read on the device, and no key or score beyond a length is.

The choice is a search for the least score that is kept, by radix selection: scores become integers in the same order,
and a histogram of the scores that agree in the higher bits tells the next eight bits of the least one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.launch import (
    Arguments,
    Launcher,
    check_same_device,
    next_power,
    num_sms,
    wait_for_previous,
)

_KEYS = 64
"""Keys of one iteration."""
_SCORES = 1024
"""Scores of one iteration of the choice."""


def index_scores_reference(
    query: Tensor, keys: Tensor, weights: Tensor, page_table: Tensor, lengths: Tensor
) -> list[Tensor]:
    """The scores of each request, as many as it is long."""
    found = []
    for row, weight, pages, length in zip(query.float(), weights, page_table, lengths.tolist(), strict=True):
        own = keys[pages[: -(-length // keys.shape[1])]].flatten(0, 1)[:length, 0].float()
        found.append((torch.relu(row @ own.T) * weight.unsqueeze(-1)).sum(0))
    return found


def index_scores(query: Tensor, keys: Tensor, weights: Tensor, page_table: Tensor, lengths: Tensor) -> Tensor:
    """[requests, heads, features], [pages, page_size, 1, features] and [requests, heads] float32 -> scores.

    Scores are [requests, most pages * page_size] float32; those from a request's length on are not written. ``query``
    and ``keys`` have one dtype, products are summed in float32. ``page_table`` [requests, most pages] and ``lengths``
    [requests] are int32. Raises UsageError for tensors that do not fit together.
    """
    check_same_device(query, keys, weights, page_table, lengths)
    (requests, heads, dim), (_, page_size, _, _) = query.shape, keys.shape
    if keys.shape[2:] != (1, dim) or keys.dtype != query.dtype or weights.shape != (requests, heads):
        shapes = f"query {list(query.shape)}, keys {list(keys.shape)}, weights {list(weights.shape)}"
        raise UsageError(f"{shapes} do not fit: [requests, heads, d], [pages, page_size, 1, d], [requests, heads]")
    _check_tables(page_table, lengths, requests)
    query, weights = query.contiguous(), weights.contiguous()
    positions = page_table.shape[1] * page_size
    scores = torch.empty(requests, positions, dtype=torch.float32, device=query.device)
    if scores.numel():
        programs = min(-(-positions // _KEYS), max(1, 4 * num_sms(query.device) // requests))
        strides = *keys.stride()[:2], page_table.stride(0)
        args: Arguments = query, keys, weights, page_table, lengths, scores, *strides, positions
        constants = {
            "HEADS": heads, "DIM": dim, "PAGE": page_size, "BLOCK_H": max(16, next_power(heads)),
            "BLOCK_D": max(16, next_power(dim)), "BLOCK_N": _KEYS,
        }  # fmt: skip
        _launch_scores(query.device, (programs, requests, 1), args, constants, num_warps=4)
    return scores


def choose_keys_reference(scores: list[Tensor], top_k: int) -> Tensor:
    """What :func:`choose_keys` returns first, from each request's scores."""
    ids = torch.full((len(scores), top_k), -1)
    for row, own in zip(ids, scores, strict=True):
        best = own.sort(descending=True, stable=True).indices[:top_k].sort().values
        row[: len(best)] = best
    return ids


def choose_keys(
    scores: Tensor, page_table: Tensor, lengths: Tensor, page_size: int, top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [requests, positions] float32 -> positions of the chosen keys, where they are, and how many.

    The first two are [requests, top_k]: int64, ascending, -1 after the last; and int32, page * page_size + place, not
    written after the last. The third, [requests] int32, is the least of top_k and the length. Raises UsageError for
    tensors that do not fit together.
    """
    check_same_device(scores, page_table, lengths)
    _check_tables(page_table, lengths, len(scores))
    if scores.dtype != torch.float32 or scores.ndim != 2 or not scores.is_contiguous() or top_k < 1:
        raise UsageError(
            f"scores are {scores.dtype} {list(scores.shape)}, top_k={top_k}; expected float32 rows and 1 or more"
        )
    shape, device = (len(scores), top_k), scores.device
    ids = torch.empty(shape, dtype=torch.int64, device=device)
    slots = torch.empty(shape, dtype=torch.int32, device=device)
    counts = torch.empty(len(scores), dtype=torch.int32, device=device)
    if len(scores):
        args = scores, page_table, lengths, ids, slots, counts, scores.shape[1], page_table.stride(0)
        constants = {"TOP_K": top_k, "PAGE": page_size, "BLOCK": min(_SCORES, max(16, next_power(scores.shape[1])))}
        _launch_choose(device, (len(scores), 1, 1), args, constants, num_warps=4)
    return ids, slots, counts


def _check_tables(page_table: Tensor, lengths: Tensor, requests: int) -> None:
    """Raise UsageError for tables of another type or number."""
    if page_table.dtype != torch.int32 or lengths.dtype != torch.int32:
        raise UsageError(f"page_table is {page_table.dtype} and lengths {lengths.dtype}; both must be int32")
    if len(page_table) != requests or lengths.shape != (requests,):
        raise UsageError(f"{requests} requests, {len(page_table)} rows of page_table, {len(lengths)} lengths")
    if page_table.stride(-1) != 1 or not lengths.is_contiguous():
        raise UsageError("page_table and lengths need their last axis contiguous")


@triton.jit
def _index_scores_kernel(
    query, keys, weights, page_table, lengths, scores, key_page, key_place, table_row, positions,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Some blocks of one request's keys, evenly spaced."""
    wait_for_previous(IS_OVERLAPPED)
    row = tl.program_id(1).to(tl.int64)
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    q = tl.load(query + (row * HEADS + h[:, None]) * DIM + d, mask=(h < HEADS)[:, None] & (d < DIM)[None, :], other=0.0)
    weight = tl.load(weights + row * HEADS + h, mask=h < HEADS, other=0.0)
    length = tl.load(lengths + row)
    first, step = tl.program_id(0) * BLOCK_N, tl.num_programs(0) * BLOCK_N
    n, table = tl.arange(0, BLOCK_N), page_table + row * table_row
    next_page = tl.load(table + (first + n) // PAGE, mask=first + n < length, other=0)
    for start in tl.range(first, length, step):
        place = start + n
        page, ahead = next_page.to(tl.int64), place + step  # one block ahead, as in paged_decode._decode_kernel
        next_page = tl.load(table + ahead // PAGE, mask=ahead < length, other=0)
        at = keys + page * key_page + place % PAGE * key_place
        k = tl.load(at[:, None] + d, mask=(place < length)[:, None] & (d < DIM)[None, :], other=0.0)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        products = tl.where(products < 0.0, 0.0, products)  # unlike a maximum, it keeps NaN
        tl.store(scores + row * positions + place, tl.sum(products * weight[:, None], 0), mask=place < length)


@triton.jit
def _ordered(x):
    """Float32 numbers as uint32 in the same order; minus zero as zero."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _choose_keys_kernel(
    scores, page_table, lengths, ids, slots, counts, positions, table_row,
    TOP_K: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """The chosen keys of one request."""
    wait_for_previous(IS_OVERLAPPED)
    row, lane, bins = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, 256)
    length = tl.load(lengths + row)
    scores += row * positions
    count = tl.minimum(length, TOP_K)
    least = tl.full([], 0, tl.uint32)  # the least number that is kept, its highest bits first
    equal = count  # how many of those numbers are kept
    if length > TOP_K:
        for digit in tl.range(4):
            shift = 24 - 8 * digit
            held = tl.zeros([256], tl.int32)
            for start in tl.range(0, length, BLOCK):
                number = _ordered(tl.load(scores + start + lane, mask=start + lane < length, other=0.0))
                number >>= shift.to(tl.uint32)
                inside = (start + lane < length) & (number >> 8 == least)
                own = tl.where(inside, number & 255, 0).to(tl.int32)
                outside = BLOCK - tl.sum(inside.to(tl.int32), 0)  # counted as 0
                held += tl.histogram(own, 256) - tl.where(bins == 0, outside, 0)
            from_here = tl.cumsum(held, 0, reverse=True)
            value = tl.max(tl.where(from_here >= equal, bins, 0), 0)
            equal -= tl.sum(tl.where(bins > value, held, 0), 0)
            least = (least << 8) | value.to(tl.uint32)
    taken, met = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in tl.range(0, length, BLOCK):
        at = start + lane
        number = _ordered(tl.load(scores + at, mask=at < length, other=0.0))
        is_equal = ((number == least) & (at < length)).to(tl.int32)
        kept = (number > least) & (at < length) | (is_equal > 0) & (met + tl.cumsum(is_equal, 0) <= equal)
        if length <= TOP_K:
            kept = at < length
        place = taken + tl.cumsum(kept.to(tl.int32), 0) - 1
        page = tl.load(page_table + row * table_row + at // PAGE, mask=kept, other=0)
        tl.store(ids + row * TOP_K + place, at.to(tl.int64), mask=kept)
        tl.store(slots + row * TOP_K + place, page * PAGE + at % PAGE, mask=kept)
        taken += tl.sum(kept.to(tl.int32), 0)
        met += tl.sum(is_equal, 0)
    for start in tl.range(count, TOP_K, BLOCK):
        tl.store(ids + row * TOP_K + start + lane, tl.full([BLOCK], -1, tl.int64), mask=start + lane < TOP_K)
    tl.store(counts + row, count)


_launch_scores = Launcher(_index_scores_kernel, overlaps=True)
_launch_choose = Launcher(_choose_keys_kernel, overlaps=True)
