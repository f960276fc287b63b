"""Top-k key selection of sparse attention in decoding (DSA, arXiv:2512.02556 section 2), over a paged key cache.

For request b (one query row each), with index heads h:

    score[t] = sum_h weight[b, h] * relu(query[b, h] . key[t])       t = 0 .. length - 1
    chosen[b] = the top_k positions with the highest scores, ascending; lower positions win ties

Position t of request b is stored in page page_table[b, t // page_size] at offset t % page_size. Grids depend on shapes
alone, so a CUDA graph may capture both kernels. Lengths are read on the device; keys and scores beyond a length are not
read.

The selection finds the smallest selected score by radix select. Scores are mapped to integers of the same order. A
histogram of the scores that match the known high bits of the threshold determines its next eight bits.
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
"""Keys per iteration."""
_SCORES = 1024
"""Scores per iteration of the selection."""


def index_scores_reference(
    query: Tensor, keys: Tensor, weights: Tensor, page_table: Tensor, lengths: Tensor
) -> list[Tensor]:
    """Compute :func:`index_scores` in plain PyTorch: one tensor [length] per request."""
    scores = []
    for row, weight, pages, length in zip(query.float(), weights, page_table, lengths.tolist(), strict=True):
        request_keys = keys[pages[: -(-length // keys.shape[1])]].flatten(0, 1)[:length, 0].float()
        scores.append((torch.relu(row @ request_keys.T) * weight.unsqueeze(-1)).sum(0))
    return scores


def index_scores(query: Tensor, keys: Tensor, weights: Tensor, page_table: Tensor, lengths: Tensor) -> Tensor:
    """Return the index scores of all cached keys, [requests, max pages * page_size] float32.

    ``query`` is [requests, heads, features], ``keys`` [pages, page_size, 1, features] of the same dtype, ``weights``
    [requests, heads] float32. Products are summed in float32. ``page_table`` [requests, max pages] and ``lengths``
    [requests] are int32. Scores from a request's length on are not written. Raises UsageError for inconsistent tensors.
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
    """Compute the first result of :func:`choose_keys` in plain PyTorch, from each request's scores."""
    ids = torch.full((len(scores), top_k), -1)
    for row, request_scores in zip(ids, scores, strict=True):
        best = request_scores.sort(descending=True, stable=True).indices[:top_k].sort().values
        row[: len(best)] = best
    return ids


def choose_keys(
    scores: Tensor, page_table: Tensor, lengths: Tensor, page_size: int, top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Select the ``top_k`` keys of each request from ``scores`` [requests, positions] float32.

    Returns (positions, slots, counts). Positions are [requests, top_k] int64, ascending, padded with -1. Slots are
    [requests, top_k] int32, page * page_size + offset, not written past the last selected key. Counts are [requests]
    int32, the minimum of top_k and the length. Raises UsageError for inconsistent tensors.
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
    """Raise UsageError for a page table or lengths of the wrong dtype, shape or strides."""
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
    """Score blocks of one request's keys in a grid-stride loop."""
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
        position = start + n
        page, next_position = (
            next_page.to(tl.int64),
            position + step,
        )  # prefetched one block ahead, see paged_decode._decode_kernel
        next_page = tl.load(table + next_position // PAGE, mask=next_position < length, other=0)
        key_ptrs = keys + page * key_page + position % PAGE * key_place
        k = tl.load(key_ptrs[:, None] + d, mask=(position < length)[:, None] & (d < DIM)[None, :], other=0.0)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        products = tl.where(products < 0.0, 0.0, products)  # unlike tl.maximum, keeps NaN
        tl.store(scores + row * positions + position, tl.sum(products * weight[:, None], 0), mask=position < length)


@triton.jit
def _sortable(x):
    """Map float32 values to uint32 in the same order; -0.0 maps like 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _choose_keys_kernel(
    scores, page_table, lengths, ids, slots, counts, positions, table_row,
    TOP_K: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Select the keys of one request by radix select."""
    wait_for_previous(IS_OVERLAPPED)
    row, lane, bins = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, 256)
    length = tl.load(lengths + row)
    scores += row * positions
    count = tl.minimum(length, TOP_K)
    threshold = tl.full([], 0, tl.uint32)  # the smallest selected value, found from the high bits down
    ties_left = count  # number of selected values equal to it
    if length > TOP_K:
        for digit in tl.range(4):
            shift = 24 - 8 * digit
            histogram = tl.zeros([256], tl.int32)
            for start in tl.range(0, length, BLOCK):
                key = _sortable(tl.load(scores + start + lane, mask=start + lane < length, other=0.0))
                key >>= shift.to(tl.uint32)
                matches = (start + lane < length) & (key >> 8 == threshold)
                digits = tl.where(matches, key & 255, 0).to(tl.int32)
                num_masked = BLOCK - tl.sum(matches.to(tl.int32), 0)  # the histogram counts masked elements as 0
                histogram += tl.histogram(digits, 256) - tl.where(bins == 0, num_masked, 0)
            suffix_sums = tl.cumsum(histogram, 0, reverse=True)
            digit_value = tl.max(tl.where(suffix_sums >= ties_left, bins, 0), 0)
            ties_left -= tl.sum(tl.where(bins > digit_value, histogram, 0), 0)
            threshold = (threshold << 8) | digit_value.to(tl.uint32)
    num_selected, num_ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in tl.range(0, length, BLOCK):
        position = start + lane
        key = _sortable(tl.load(scores + position, mask=position < length, other=0.0))
        is_equal = ((key == threshold) & (position < length)).to(tl.int32)
        selected = (key > threshold) & (position < length) | (is_equal > 0) & (
            num_ties + tl.cumsum(is_equal, 0) <= ties_left
        )
        if length <= TOP_K:
            selected = position < length
        place = num_selected + tl.cumsum(selected.to(tl.int32), 0) - 1
        page = tl.load(page_table + row * table_row + position // PAGE, mask=selected, other=0)
        tl.store(ids + row * TOP_K + place, position.to(tl.int64), mask=selected)
        tl.store(slots + row * TOP_K + place, page * PAGE + position % PAGE, mask=selected)
        num_selected += tl.sum(selected.to(tl.int32), 0)
        num_ties += tl.sum(is_equal, 0)
    for start in tl.range(count, TOP_K, BLOCK):
        tl.store(ids + row * TOP_K + start + lane, tl.full([BLOCK], -1, tl.int64), mask=start + lane < TOP_K)
    tl.store(counts + row, count)


_launch_scores = Launcher(_index_scores_kernel, overlaps=True)
_launch_choose = Launcher(_choose_keys_kernel, overlaps=True)
