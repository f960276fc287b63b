"""Paged prefill attention: causal attention of any number of query rows per request over paged keys and values.

Row i of request b has position p = lengths[b] - count[b] + i, where count[b] = starts[b + 1] - starts[b] is the number
of the request's rows in this step: a whole prompt, a chunk of a prompt (chunked prefill), the suffix after a cached
prefix, or a single row. The row attends to the positions max(0, p - window + 1) .. p. Scores, softmax, soft-cap and
sinks are as in kernels/triton/paged_decode.py.

Each program computes a block of rows times the query heads of one key/value head, as in vLLM's Triton backend
(arXiv:2511.11581), with the online softmax of arXiv:2205.14135. It iterates first over key blocks that are fully
visible to every row, then over the masked blocks on the diagonal. Key blocks are aligned to their size, so a row's bits
depend neither on other rows nor on the chunking of its prompt. The grid depends on shapes alone: program n belongs to
the last request b with starts[b] // block + b <= n.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.launch import (
    Launcher,
    check_same_device,
    check_stored,
    has_small_shared_memory,
    next_power,
)
from tapscope.kernels.triton.paged_decode import attended, capped, factors, key_blocks, widened


class PrefillLaunch(NamedTuple):
    """Launch configuration of the kernel for a class of shapes."""

    rows: int
    """Rows of a program's tile (BLOCK_M): query rows times query heads per key/value head.

    At most 128 are used for short requests, and for models whose number of query heads per key/value head is less than
    4 or not a power of two."""
    block: int
    """Positions per iteration (BLOCK_N)."""
    warps: int
    stages: int


PREFILL_LAUNCHES: dict[tuple[int, int], PrefillLaunch] = {
    (64, 2): PrefillLaunch(128, 64, 4, 3),
    (128, 2): PrefillLaunch(256, 64, 8, 3),
    (256, 2): PrefillLaunch(128, 64, 8, 2),
    (64, 1): PrefillLaunch(128, 64, 4, 3),
    (128, 1): PrefillLaunch(128, 64, 4, 3),
    (256, 1): PrefillLaunch(128, 32, 8, 2),
    (64, 4): PrefillLaunch(64, 32, 4, 2),
    (128, 4): PrefillLaunch(64, 32, 4, 2),
    (256, 4): PrefillLaunch(32, 16, 4, 1),
}
"""Launch by class of key dim (up to 64, 128 or 256) and bytes per stored element."""

SMALL_PREFILL_LAUNCHES = PREFILL_LAUNCHES | {
    (128, 2): PrefillLaunch(256, 64, 8, 2),
    (256, 2): PrefillLaunch(64, 32, 4, 2),
    (256, 1): PrefillLaunch(64, 32, 4, 2),
}
"""As :data:`PREFILL_LAUNCHES`, for GPUs with 99 KiB of shared memory per program."""


def paged_prefill_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    stored_scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """Compute :func:`paged_prefill` in plain PyTorch, one request at a time; copies ``lengths`` to the host."""
    if keys.dtype != query.dtype:
        keys, values = (
            (pool.float() * by).to(query.dtype) for pool, by in zip((keys, values), stored_scales, strict=True)
        )
    output = query.new_zeros(*query.shape[:2], values.shape[3])
    bounds = starts.tolist()
    for b, length in enumerate(lengths.tolist()):
        rows = slice(bounds[b], bounds[b + 1])
        used = page_table[b, : -(-length // keys.shape[1])]
        group = query.shape[1] // keys.shape[2]
        k, v = (pool[used].flatten(0, 1)[:length].repeat_interleave(group, 1).float() for pool in (keys, values))
        scores = torch.einsum("ihd,thd->hit", query[rows].float(), k).mul(scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        key_position = torch.arange(length, device=query.device)
        position = key_position[length - scores.shape[1] :, None]
        masked = (key_position > position) | (key_position <= position - (window or length))
        scores = scores.masked_fill(masked, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)), dim=-1)
        weights = scores.softmax(-1)[..., :length]
        output[rows] = torch.einsum("hit,thd->ihd", weights, v).to(query.dtype)
    return output


def paged_prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    stored_scales: tuple[float, float] = (1.0, 1.0),
    is_batch_invariant: bool = False,
    num_prompts: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of ``query`` [tokens, heads, key dim] against paged keys and values.

    Returns [tokens, heads, value dim] in the query's dtype, written to ``out`` if given. ``keys``, ``values``,
    ``page_table`` [requests, max pages] and ``lengths`` [requests] are as in
    :func:`tapscope.kernels.triton.paged_decode.paged_decode`; lengths include the rows of this step. ``starts``
    [requests + 1] int32 holds the first row of each request, then the end of the last request's rows; other rows are
    not written. A request may have zero rows. Key and value dims are at most 256. ``num_prompts`` is the number of
    requests that own most of the rows (all if None); it only affects speed. With ``is_batch_invariant``, the launch
    does not depend on the number of rows, so a row's bits do not depend on the batch. Raises UsageError for
    inconsistent tensors.
    """
    _check(query, keys, values, page_table, starts, lengths, sinks)
    (tokens, heads, dim), (_, page_size, kv_heads, width) = query.shape, values.shape
    output = query.new_empty(tokens, heads, width) if out is None else out
    group, requests = heads // kv_heads, len(lengths)
    launches = SMALL_PREFILL_LAUNCHES if has_small_shared_memory(query.device) else PREFILL_LAUNCHES
    launch = launches[64 if dim <= 64 else 128 if dim <= 128 else 256, keys.element_size()]
    is_wide = group >= 4 and group == next_power(group) and tokens * group >= launch.rows * (num_prompts or requests)
    rows = max(launch.rows if is_wide and not is_batch_invariant else min(launch.rows, 128), next_power(group))
    main, rest = key_blocks(dim)
    if not tokens or not requests:
        return output
    strides = *query.stride(), *keys.stride()[:3], *values.stride()[:3], page_table.stride(0), *output.stride()[:2]
    numbers = requests, *factors(scale, softcap), *stored_scales, window or 0
    constants = {
        "GROUP": group, "PAGE": page_size, "DIM": dim, "WIDTH": width, "MAIN": main, "REST": rest,
        "BLOCK_V": max(16, next_power(width)), "BLOCK_M": rows, "BLOCK_N": launch.block,
        "IS_WINDOWED": window is not None, "IS_CAPPED": softcap is not None, "IS_SCALED": stored_scales != (1.0, 1.0),
        "IS_ALIKE": keys.stride()[:3] == values.stride()[:3],
    }  # fmt: skip
    tensors = query, keys, values, page_table, starts, lengths, sinks, output
    grid = tokens // (rows // group) + requests, kv_heads, 1
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": False}
    _launch_prefill(query.device, grid, (*tensors, *strides, *numbers), constants, **options)
    return output


def _check(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
) -> None:
    """Raise UsageError for inconsistent shapes, dtypes, strides or devices."""
    check_same_device(query, keys, values, page_table, starts, lengths, sinks)
    check_stored(keys.dtype, keys.device)
    if query.shape[2] != keys.shape[3] or keys.shape[:3] != values.shape[:3] or query.shape[1] % keys.shape[2]:
        shapes = f"{list(query.shape)}, keys {list(keys.shape)} and values {list(values.shape)}"
        raise UsageError(f"query {shapes} do not fit: [tokens, heads, d] and twice [pages, page_size, kv_heads, d]")
    if max(query.shape[2], values.shape[3]) > 256 or query.shape[1] // keys.shape[2] > 256:
        raise UsageError("key and value dims, and the heads of a key/value head, go up to 256")
    if {page_table.dtype, starts.dtype, lengths.dtype} != {torch.int32}:
        raise UsageError("page_table, starts and lengths must be int32")
    if len(page_table) != len(lengths) or len(starts) != len(lengths) + 1:
        raise UsageError(f"{len(page_table)} rows of page_table, {len(starts)} starts, {len(lengths)} lengths")
    vectors = [starts, lengths] if sinks is None else [starts, lengths, sinks]
    if any(t.stride(-1) != 1 for t in (keys, values, page_table)) or not all(t.is_contiguous() for t in vectors):
        raise UsageError("keys, values, page_table, starts, lengths and sinks need their last axis contiguous")
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise UsageError(f"sinks {list(sinks.shape)}: expected one per head ({query.shape[1]})")


@triton.jit
def _find_request(starts, block, requests, BLOCK_Q: tl.constexpr):
    """Return the last request whose first block is not after ``block``, by binary search."""
    low, high = 0 * requests, requests - 1
    while low < high:
        middle = (low + high + 1) // 2
        is_before = tl.load(starts + middle) // BLOCK_Q + middle <= block
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle - 1)
    return low


@triton.jit
def _load_tile(row_ptrs, valid, feature, DIM: tl.constexpr, BLOCK: tl.constexpr, IS_MASKED: tl.constexpr):
    """Load a tile [positions, features] from ``row_ptrs`` [positions, 1], masked by ``valid`` positions and by DIM."""
    if IS_MASKED:
        return tl.load(row_ptrs + feature, mask=valid[:, None] & (feature < DIM), other=0.0)
    elif DIM % BLOCK == 0:
        return tl.load(row_ptrs + feature)
    else:
        return tl.load(row_ptrs + feature, mask=feature < DIM, other=0.0)


@triton.jit
def _attend_range(
    q, q_rest, score_scale, row_max, denom, acc, keys, values, table, low, high, position, window,
    key_page, key_place, value_page, value_place, factor, cap, key_scale, value_scale,
    PAGE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, IS_MASKED: tl.constexpr, IS_WINDOWED: tl.constexpr,
    IS_CAPPED: tl.constexpr, IS_SCALED: tl.constexpr, IS_ALIKE: tl.constexpr,
):  # fmt: skip
    """Return the online-softmax state (row_max, denom, acc) after attending to the positions [low, high)."""
    dtype: tl.constexpr = q.dtype
    d, r, e = tl.arange(0, MAIN), MAIN + tl.arange(0, REST if REST else 16), tl.arange(0, BLOCK_V)
    n = tl.arange(0, BLOCK_N)
    next_page = tl.load(table + (low + n) // PAGE, mask=low + n < high, other=0)
    for start in tl.range(low, high, BLOCK_N):
        key_position = start + n
        key_mask = key_position < high
        page, next_position = (
            next_page.to(tl.int64),
            key_position + BLOCK_N,
        )  # prefetched one block ahead, see _decode_kernel
        if BLOCK_N % PAGE == 0:  # start is a multiple of BLOCK_N: the offsets in pages are loop-invariant
            page_offset, page_ptrs = n % PAGE, table + (start + BLOCK_N) // PAGE + n // PAGE
        else:
            page_offset, page_ptrs = key_position % PAGE, table + next_position // PAGE
        next_page = tl.load(page_ptrs, mask=next_position < high, other=0)
        key_offset = page * key_page + page_offset * key_place
        row_ptrs = (keys + key_offset)[:, None]
        k = widened(_load_tile(row_ptrs, key_mask, d, DIM, MAIN, IS_MASKED), key_scale, dtype, IS_SCALED, False)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST:
            k_rest = _load_tile(row_ptrs, key_mask, r, DIM, MAIN + REST, IS_MASKED)
            k_rest = widened(k_rest, key_scale, dtype, IS_SCALED, False)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        if IS_CAPPED:
            scores = capped(scores * factor, cap)
        if IS_MASKED:
            visible = key_mask[None, :] & (key_position[None, :] <= position[:, None])
            if IS_WINDOWED:
                visible &= key_position[None, :] > position[:, None] - window
            scores = tl.where(visible, scores, float("-inf"))
        if IS_ALIKE:
            row_ptrs = (values + key_offset)[:, None]
        else:
            row_ptrs = (values + page * value_page + page_offset * value_place)[:, None]
        v = widened(_load_tile(row_ptrs, key_mask, e, WIDTH, BLOCK_V, IS_MASKED), value_scale, dtype, IS_SCALED, False)
        row_max, denom, acc = attended(scores, score_scale, v, row_max, denom, acc)
    return row_max, denom, acc


_VIEWS = ["page_table", "starts", "lengths"]
"""Arguments that are views of larger buffers, at any address: not specialized on alignment, to avoid recompilation."""


@triton.jit(do_not_specialize=["requests", "table_row"], do_not_specialize_on_alignment=_VIEWS)
def _prefill_kernel(
    query, keys, values, page_table, starts, lengths, sinks, output,
    query_row, query_head, query_dim, key_page, key_place, key_head, value_page, value_place, value_head, table_row,
    output_row, output_head, requests, factor, cap, key_scale, value_scale, window,
    GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, MAIN: tl.constexpr,
    REST: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_WINDOWED: tl.constexpr, IS_CAPPED: tl.constexpr, IS_SCALED: tl.constexpr, IS_ALIKE: tl.constexpr,
):  # fmt: skip
    """Attend for BLOCK_M // GROUP query rows of one request, for all query heads of one key/value head."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    block, kv_head = (
        tl.num_programs(0) - 1 - tl.program_id(0),
        tl.program_id(1),
    )  # programs with the longest context start first
    request = _find_request(starts, block, requests, BLOCK_Q)
    begin = tl.load(starts + request)
    count = tl.load(starts + request + 1) - begin
    first = (block - begin // BLOCK_Q - request) * BLOCK_Q
    if (first >= count) | (first < 0):
        return
    length = tl.load(lengths + request)
    m = tl.arange(0, BLOCK_M)
    row, head = first + m // GROUP, kv_head * GROUP + m % GROUP
    valid = (m < BLOCK_Q * GROUP) & (row < count)
    position = length - count + row
    d, r, e = tl.arange(0, MAIN), MAIN + tl.arange(0, REST if REST else 16), tl.arange(0, BLOCK_V)
    ptrs = query + ((begin + row).to(tl.int64) * query_row + head * query_head)[:, None]
    q = tl.load(ptrs + d * query_dim, mask=valid[:, None] & (d < DIM), other=0.0)
    q_rest = tl.load(ptrs + r * query_dim, mask=valid[:, None] & (r < DIM), other=0.0)
    score_scale = tl.full([BLOCK_M], 1.0, tl.float32) if IS_CAPPED else tl.full([BLOCK_M], factor, tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denom, acc = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if sinks is not None:
        row_max = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634 / score_scale
        denom += 1.0
    high = tl.minimum(length - count + first + BLOCK_Q, length)
    low = tl.maximum(length - count + first - window + 1, 0) // BLOCK_N * BLOCK_N if IS_WINDOWED else 0
    unmasked_end = tl.maximum((length - count + first + 1) // BLOCK_N * BLOCK_N, low)
    keys += kv_head * key_head
    values += kv_head * value_head
    table = page_table + request.to(tl.int64) * table_row
    row_max, denom, acc = _attend_range(
        q, q_rest, score_scale, row_max, denom, acc, keys, values, table, low, unmasked_end, position, window,
        key_page, key_place, value_page, value_place, factor, cap, key_scale, value_scale,
        PAGE, DIM, WIDTH, MAIN, REST, BLOCK_V, BLOCK_N, IS_WINDOWED, IS_WINDOWED, IS_CAPPED, IS_SCALED, IS_ALIKE,
    )  # fmt: skip
    row_max, denom, acc = _attend_range(
        q, q_rest, score_scale, row_max, denom, acc, keys, values, table, unmasked_end, high, position, window,
        key_page, key_place, value_page, value_place, factor, cap, key_scale, value_scale,
        PAGE, DIM, WIDTH, MAIN, REST, BLOCK_V, BLOCK_N, True, IS_WINDOWED, IS_CAPPED, IS_SCALED, IS_ALIKE,
    )  # fmt: skip
    ptrs = output + ((begin + row).to(tl.int64) * output_row + head * output_head)[:, None] + e
    tl.store(ptrs, (acc / denom[:, None]).to(output.dtype.element_ty), mask=valid[:, None] & (e < WIDTH))


_launch_prefill = Launcher(_prefill_kernel)
