"""Paged decode attention: one query row per request against paged keys and values, with split-KV.

For request b, head h and its key/value head g = h // (heads / kv_heads), arXiv:1706.03762:

    scores[t] = cap(scale * query[b, h] . key[t, g])       t = first .. length - 1
    out[b, h] = sum_t softmax(scores)[t] * value[t, g]

first = max(0, length - window) with a sliding window, the start of the last position's chunk with chunked attention
(Llama 4), else 0. cap(s) = softcap * tanh(s / softcap) (Gemma 2, arXiv:2408.00118), else s. A sink adds exp(sinks[h])
to the softmax denominator and nothing to the sum (gpt-oss, arXiv:2309.17453). Position t of request b is stored in page
page_table[b, t // page_size] at offset t % page_size.

Each program processes one request, one key/value head and one split of the sequence (Flash-Decoding, Dao et al., 2023)
with the online softmax of arXiv:2205.14135; a second kernel merges the splits. The grid depends on shapes alone, so a
CUDA graph may capture it. Lengths are read on the device, and optionally the number of requests (``num_active``), over
which the programs are then distributed. Scores, softmax and accumulators are float32; softmax weights are rounded to
the query's dtype before the product with the values.

If a request may have several rows (verification of drafts), the program of its first row computes all of them, so keys
and values are read once; the programs of its other rows exit. Two adjacent rows belong to one request if their lengths
are consecutive and they share the page of the first row's last position: a page written in this step belongs to one
request.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.launch import (
    Arguments,
    Launcher,
    check_same_device,
    check_stored,
    has_small_shared_memory,
    next_power,
    num_sms,
    wait_for_previous,
)
from tapscope.kernels.triton.quantize import GROUP, Quantized, quantize_into, store_quantized

MAX_SPLITS = 64
"""Maximum number of splits of a sequence chosen by default."""
_MIN_SPLIT_POSITIONS = 64
"""Minimum number of positions of a split."""
_MIN_ACTIVE_SPLITS = 4
"""Minimum number of splits per request if only the device knows the number of requests."""
_MERGE_SIZE = 16
_MERGE_BLOCK = tl.constexpr(_MERGE_SIZE)
"""Splits merged per iteration. Constant, so the summation order does not depend on the number of splits."""


class Launch(NamedTuple):
    """Launch configuration of the kernel for a class of shapes."""

    block: int
    """Positions per iteration (BLOCK_N)."""
    warps: int
    stages: int
    """Software pipeline stages."""
    registers: int | None = None
    """Maximum registers per thread (maxnreg), to raise occupancy; None leaves the choice to the compiler."""
    resident: int = 2
    """Resident programs (CTAs) per SM, which their register use permits."""


LAUNCHES: dict[tuple[int, int, bool], Launch] = {
    (64, 2, False): Launch(64, 4, 3, 128, resident=4),
    (128, 2, False): Launch(64, 4, 2, resident=4),
    (256, 2, False): Launch(32, 4, 4),
    (1024, 2, False): Launch(64, 4, 2),
    (64, 2, True): Launch(64, 4, 3),
    (128, 2, True): Launch(64, 4, 3),
    (256, 2, True): Launch(32, 8, 2),
    (1024, 2, True): Launch(32, 8, 2, resident=1),
    (64, 1, False): Launch(128, 4, 3, resident=4),
    (128, 1, False): Launch(128, 4, 3),
    (256, 1, False): Launch(64, 4, 3),
    (1024, 1, False): Launch(32, 4, 2),
    (64, 1, True): Launch(64, 4, 3),
    (128, 1, True): Launch(64, 4, 3),
    (256, 1, True): Launch(32, 8, 2),
    (1024, 1, True): Launch(32, 8, 2),
    (64, 4, False): Launch(64, 4, 2),
    (128, 4, False): Launch(32, 4, 2),
    (256, 4, False): Launch(32, 4, 2),
    (1024, 4, False): Launch(16, 4, 1),
    (64, 4, True): Launch(32, 4, 2),
    (128, 4, True): Launch(32, 4, 2),
    (256, 4, True): Launch(16, 4, 1),
    (1024, 4, True): Launch(16, 8, 1),
}
"""Launch by class of key dim (up to 64, 128, 256, larger), bytes per stored element, and whether tiles exceed 16 rows.

The rows of a tile are the query heads of a key/value head, possibly of several query rows. benchmarks/tune_triton.py
measures the values. No entry depends on the batch size, as batch invariance requires.
"""

SMALL_LAUNCHES = LAUNCHES | {
    (256, 2, False): Launch(64, 4, 2),
    (1024, 2, True): Launch(16, 8, 2, resident=1),
    (1024, 1, True): Launch(16, 8, 2, resident=1),
}
"""As :data:`LAUNCHES`, for GPUs with 99 KiB of shared memory per program."""


def paged_decode_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor | None,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    stored_scales: tuple[float, float] = (1.0, 1.0),
    value_dim: int | None = None,
) -> Tensor:
    """Compute :func:`paged_decode` in plain PyTorch, one request at a time; copies ``lengths`` to the host."""
    if keys.dtype != query.dtype:
        keys = (keys.float() * stored_scales[0]).to(query.dtype)
        if values is not None:
            values = (values.float() * stored_scales[1]).to(query.dtype)
    pools = keys, keys[..., :value_dim] if value_dim is not None or values is None else values
    group = query.shape[1] // keys.shape[2]
    outputs = []
    for row, pages, length in zip(query, page_table, lengths.tolist(), strict=True):
        start = max(0, length - window) if window else max(0, length - 1) // chunk * chunk if chunk else 0
        used = pages[: -(-length // keys.shape[1])]
        k, v = (pool[used].flatten(0, 1)[start:length].repeat_interleave(group, 1).float() for pool in pools)
        scores = torch.einsum("hd,thd->ht", row.float(), k).mul(scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None]), dim=1)
        weights = scores.softmax(-1)[:, : length - start]
        outputs.append(torch.einsum("ht,thd->hd", weights, v).to(query.dtype))
    return torch.stack(outputs)


def paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor | None,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    stored_scales: tuple[float, float] = (1.0, 1.0),
    value_dim: int | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    most_rows: int = 1,
    num_active: Tensor | None = None,
    out: Tensor | None = None,
    quantized: Quantized | None = None,
) -> Tensor:
    """Compute decode attention of ``query`` [requests, heads, key dim] against paged keys and values.

    Returns [requests, heads, value dim] in the query's dtype, written to ``out`` if given. ``keys`` and ``values`` are
    [pages, page_size, kv_heads, dim] with a contiguous last axis and arbitrary other strides. Their dtype is the
    query's, or FP8; an FP8 number times its ``stored_scales`` entry (keys, values) is rounded once to the query's
    dtype. With ``value_dim``, the values are the first ``value_dim`` features of the keys (MLA, arXiv:2405.04434) and
    ``values`` is ignored. ``page_table`` [requests, max pages] and ``lengths`` [requests] are int32 on the device. A
    request of length 0 is padding: its pages are not read and its output is zero. ``window`` is the number of positions
    a row attends to, including its own; with ``chunk``, a row attends to its own chunk of that size. ``sinks`` is
    [heads].

    The sequence is divided into ``num_splits`` splits of equal size, by default as many as fill the device. With
    ``split_size``, splits have that many positions, and a row's bits do not depend on the batch. ``quantized`` receives
    the output [requests, heads * value dim] quantized in groups, see :func:`.quantize.quantize`.

    ``num_active`` [1] int32 on the device is the number of leading requests to compute; the output of the others is not
    written. The grid does not depend on ``num_active``: with fewer requests, each request gets more splits.

    With ``most_rows``, up to that many adjacent rows may belong to one request, at consecutive positions whose keys and
    values this step has stored. Such rows share one read of keys and values if their heads fit into one program; a
    non-finite value then also propagates to earlier rows of its request. Raises UsageError for inconsistent tensors or
    options.
    """
    if value_dim is not None:
        values = keys[..., :value_dim]
    if values is None:
        raise UsageError("values are missing; without them value_dim says how many features of the keys they are")
    if window is not None and chunk is not None:
        raise UsageError(f"window={window} and chunk={chunk}: only one of them is supported")
    _check(query, keys, values, page_table, lengths, sinks)
    is_divided = num_splits is not None or split_size is not None
    if num_active is not None and (is_divided or quantized is not None or most_rows > 1):
        raise UsageError("num_active does not go with num_splits, split_size, most_rows or quantized")
    output = query.new_empty(*query.shape[:2], values.shape[3]) if out is None else out
    group = query.shape[1] // keys.shape[2]
    max_rows = 64 if keys.element_size() < 4 else 32
    rows_per_request = most_rows if group * most_rows <= max_rows else 1
    rows = min(max_rows, max(16, next_power(group * rows_per_request)))
    programs = keys.shape[2] * -(-group // rows)
    positions = page_table.shape[1] * keys.shape[1]
    launch, sms = _select_launch(query, keys, rows), num_sms(query.device)
    units = 0
    if split_size is not None:
        splits = _splits_of_size(split_size, positions)
    elif num_active is not None:
        splits = max(1, _splits(programs, positions, sms, launch) // _MERGE_SIZE) * _MERGE_SIZE
        units = max(_MIN_ACTIVE_SPLITS * len(query), splits)
    else:
        splits = num_splits or _splits(programs * max(1, -(-len(query) // rows_per_request)), positions, sms, launch)
    if quantized is not None:
        quantized.check(len(query), output[0].numel())
    if len(query):
        tensors = query, keys, values, page_table, lengths, sinks, output
        numbers = *factors(scale, softcap), *stored_scales, window or -(chunk or 0)
        flags = {"IS_CAPPED": softcap is not None, "IS_LATENT": value_dim == key_blocks(keys.shape[3])[0]}
        is_merged = splits > 1 and output.shape[2] == GROUP  # each merge program then has one whole group
        merged = quantized if is_merged else None
        active = num_active, units
        _run(tensors, numbers, (programs, splits), (rows, rows_per_request), split_size or 0, flags, merged, active)
        if quantized is not None and not is_merged:
            quantize_into(output.flatten(1), quantized)
    return output


def _run(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor],
    numbers: tuple[float, ...],
    sizes: tuple[int, int],
    rows: tuple[int, int],
    split_size: int,
    flags: dict[str, bool],
    quantized: Quantized | None,
    active: tuple[Tensor | None, int],
) -> None:
    """Launch the decode kernel, and for several splits the merge kernel, which may quantize.

    ``sizes`` is (programs per split, splits per request). ``rows`` is (rows of a program's tile of scores, maximum rows
    of a request). ``active`` is (``num_active``, total number of splits to distribute over the active requests).
    """
    query, keys, values, page_table, lengths, _, output = tensors
    (requests, heads, dim), (_, page_size, kv_heads, width), (programs, splits) = query.shape, values.shape, sizes
    (main, rest), launch = key_blocks(dim), _select_launch(query, keys, rows[0])
    partial = states = output
    num_active, units = active
    if splits > 1:
        num_parts = heads * (units or splits * requests)
        partial = torch.empty(num_parts, width, dtype=torch.float32, device=query.device)
        states = torch.empty(num_parts, 2, dtype=torch.float32, device=query.device)
    strides = *query.stride(), *keys.stride()[:3], *values.stride()[:3], page_table.stride(0), *output.stride()[:2]
    is_fp8 = keys.element_size() == 1 and query.element_size() == 2
    constants = {
        "HEADS": heads, "GROUP": heads // kv_heads, "PAGE": page_size, "DIM": dim, "WIDTH": width, "MAIN": main,
        "REST": rest, "BLOCK_V": main if flags["IS_LATENT"] else max(16, next_power(width)), "BLOCK_M": rows[0],
        "ROWS": rows[1], "BLOCK_N": launch.block, "IS_SPLIT": splits > 1, "SPLIT_SIZE": split_size, "IS_FP8": is_fp8,
        "IS_SCALED": numbers[2:4] != (1.0, 1.0), **flags,
    }  # fmt: skip
    options: dict[str, Any] = {"num_warps": launch.warps, "num_stages": launch.stages, "maxnreg": launch.registers}
    options["enable_fp_fusion"] = False
    args: Arguments = *tensors, partial, states, num_active, *strides, *numbers, splits
    grid = (programs, splits, requests) if num_active is None else (programs, units, 1)
    _launch_decode(query.device, grid, args, constants, **options)
    if splits > 1:
        features = min(128, next_power(width))
        codes, scales = (None, None) if quantized is None else quantized[:2]
        args = partial, states, lengths, output, codes, scales, num_active, *output.stride()[:2], units
        blocks = {"WIDTH": width, "SPLITS": splits, "BLOCK_S": max(16, next_power(splits)), "BLOCK_V": features}
        grid, merge_constants = (heads, requests, -(-width // features)), blocks | Quantized.constants(quantized)
        _launch_merge(query.device, grid, args, merge_constants, num_warps=1)


def _check(
    query: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, lengths: Tensor, sinks: Tensor | None
) -> None:
    """Raise UsageError for inconsistent shapes, dtypes, strides or devices."""
    check_same_device(query, keys, values, page_table, lengths, sinks)
    check_stored(keys.dtype, keys.device)
    if query.shape[2] != keys.shape[3] or keys.shape[:3] != values.shape[:3] or query.shape[1] % keys.shape[2]:
        shapes = f"{list(query.shape)}, keys {list(keys.shape)} and values {list(values.shape)}"
        raise UsageError(f"query {shapes} do not fit: [requests, heads, d] and twice [pages, page_size, kv_heads, d]")
    if page_table.dtype != torch.int32 or lengths.dtype != torch.int32:
        raise UsageError(f"page_table is {page_table.dtype} and lengths {lengths.dtype}; both must be int32")
    if len(page_table) != len(query) or len(lengths) != len(query):
        raise UsageError(f"{len(query)} queries, {len(page_table)} rows of page_table, {len(lengths)} lengths")
    if any(tensor.stride(-1) != 1 for tensor in (keys, values, page_table)) or not lengths.is_contiguous():
        raise UsageError("keys, values, page_table and lengths need their last axis contiguous")
    if sinks is not None and (sinks.shape != query.shape[1:2] or not sinks.is_contiguous()):
        raise UsageError(f"sinks {list(sinks.shape)}: expected one per head ({query.shape[1]})")


def _splits_of_size(split_size: int, positions: int) -> int:
    """Return the maximum number of splits of ``split_size`` positions; raise UsageError for an invalid size."""
    if split_size <= 0 or split_size % 128:
        raise UsageError(f"split_size={split_size}: expected a positive multiple of 128")
    return max(1, -(-positions // split_size))


def _splits(programs: int, positions: int, sms: int, launch: Launch) -> int:
    """Return the number of splits of a sequence for one full wave, given ``programs`` per split.

    The merge reduces 16 splits per iteration, so a small excess over a multiple of 16 is dropped. The result depends on
    shapes alone: ``positions`` is the capacity of a page table row.
    """
    splits = launch.resident * sms // programs
    rest = splits % _MERGE_SIZE
    if splits > _MERGE_SIZE and rest <= splits // 8:
        splits -= rest
    return max(1, min(MAX_SPLITS, splits, -(-positions // _MIN_SPLIT_POSITIONS)))


def factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """Return (factor of the dot products, factor of tanh), with log2(e) folded in because the softmax uses exp2."""
    log2e = math.log2(math.e)
    return (scale * log2e, 0.0) if softcap is None else (scale / softcap, softcap * log2e)


@functools.lru_cache(maxsize=64)
def key_blocks(dim: int) -> tuple[int, int]:
    """Split a key dim into (main, rest) blocks, powers of two >= 16, or rest 0: 576 = 512 + 64, 96 = 64 + 32."""
    main = max(16, 1 << (dim.bit_length() - 1))
    return main, max(16, next_power(dim - main)) if dim > main else 0


def _select_launch(query: Tensor, keys: Tensor, rows: int) -> Launch:
    """Return the launch configuration for programs of ``rows`` rows."""
    launches = SMALL_LAUNCHES if has_small_shared_memory(query.device) else LAUNCHES
    dim = query.shape[2]
    return launches[
        64 if dim <= 64 else 128 if dim <= 128 else 256 if dim <= 256 else 1024, keys.element_size(), rows > 16
    ]


@triton.jit
def widened(stored, scale, dtype: tl.constexpr, IS_SCALED: tl.constexpr, IS_EXACT: tl.constexpr):
    """Convert stored elements to the compute dtype: ``stored`` * ``scale`` rounded once, or ``stored`` if IS_EXACT."""
    if IS_SCALED and not IS_EXACT:
        product = stored.to(tl.float32) * scale
        if dtype == tl.float16:  # saturate instead of overflowing to infinity
            product = tl.where(product > 65504.0, 65504.0, tl.where(product < -65504.0, -65504.0, product))
        return product.to(dtype)
    else:
        return stored.to(dtype)


@triton.jit
def capped(scores, cap):
    """Return ``cap * tanh(scores)``."""
    return cap - 2.0 * cap / (tl.exp2(scores * 2.8853900817779268) + 1.0)


@triton.jit
def _first_visible(length, window):
    """Return the first position that position ``length - 1`` attends to; a negative ``window`` is a chunk size."""
    begin = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    chunk = tl.maximum(-window, 1)
    return tl.where(window < 0, tl.maximum(length - 1, 0) // chunk * chunk, begin)


@triton.jit
def _split_range(begin, length, split, splits, SPLIT_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the positions [low, high) of this split; ``low`` is a multiple of BLOCK_N. [begin, length) are visible."""
    aligned = begin // BLOCK_N * BLOCK_N
    if SPLIT_SIZE > 0:
        low = tl.maximum(split * SPLIT_SIZE, aligned)
        high = tl.minimum((split + 1) * SPLIT_SIZE, length)
    else:
        size = (length - aligned + splits * BLOCK_N - 1) // (splits * BLOCK_N) * BLOCK_N
        low = aligned + split * size
        high = tl.minimum(low + size, length)
    return low, high


@triton.jit
def _rows_of_request(lengths, page_table, row, table_row, i, ROWS: tl.constexpr, PAGE: tl.constexpr):
    """Return the number of rows of the request that starts at ``row``, or 0 if the previous row belongs to it too.

    ``i`` is an arange over at least ROWS elements.
    """
    index, is_row = row + i, (i < ROWS) & (row + i > 0) & (row + i < tl.num_programs(2))
    previous_length = tl.load(lengths + index - 1, mask=is_row, other=0)
    follows = is_row & (previous_length > 0) & (tl.load(lengths + index, mask=is_row, other=0) == previous_length + 1)
    page = page_table + index * table_row + tl.maximum(previous_length - 1, 0) // PAGE
    follows &= tl.load(page, mask=follows, other=0) == tl.load(page - table_row, mask=follows, other=0)
    count = tl.min(tl.where(follows | (i == 0) | (i >= ROWS), ROWS, i), 0)
    return tl.where(tl.max((follows & (i == 0)).to(tl.int32), 0) > 0, 0, count)


@triton.jit
def _splits_per_request(num_active, units, splits):
    """Return the splits per active request: an equal share of ``units`` (total splits), at most ``splits``."""
    return tl.minimum(units // tl.maximum(tl.load(num_active), 1), splits)


_VIEWS = ["page_table", "lengths", "num_active"]
"""Arguments that are views of larger buffers, at any address: not specialized on alignment, to avoid recompilation."""


@triton.jit(do_not_specialize=["table_row", "splits"], do_not_specialize_on_alignment=_VIEWS)
def _decode_kernel(
    query, keys, values, page_table, lengths, sinks, output, partial, states, num_active,
    query_row, query_head, query_dim, key_page, key_place, key_head, value_page, value_place, value_head, table_row,
    output_row, output_head, factor, cap, key_scale, value_scale, window, splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    MAIN: tl.constexpr, REST: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, IS_SPLIT: tl.constexpr, SPLIT_SIZE: tl.constexpr, IS_FP8: tl.constexpr,
    IS_SCALED: tl.constexpr, IS_CAPPED: tl.constexpr, IS_LATENT: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Attend to one split, for BLOCK_M heads of a key/value head in one row, or all its heads in up to ROWS rows."""
    wait_for_previous(IS_OVERLAPPED)
    BLOCKS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    dtype: tl.constexpr = tl.float16 if IS_FP8 else query.dtype.element_ty
    kv_head, split, row = tl.program_id(0) // BLOCKS, tl.program_id(1), tl.program_id(2).to(tl.int64)
    m, count = tl.arange(0, BLOCK_M), 1
    if num_active is not None:
        splits = _splits_per_request(num_active, tl.num_programs(1), splits)
        row, split = (split // splits).to(tl.int64), split % splits
        count = (row < tl.load(num_active)).to(tl.int32)
    elif ROWS > 1:
        count = _rows_of_request(lengths, page_table, row, table_row, m, ROWS, PAGE)
    if count == 0:
        return
    if ROWS > 1:
        group_head, row_offset = m % GROUP, m // GROUP
        valid = row_offset < count
    else:
        group_head, row_offset = tl.program_id(0) % BLOCKS * BLOCK_M + m, 0 * m
        valid = group_head < GROUP
    head = kv_head * GROUP + group_head
    d, r, e = tl.arange(0, MAIN), MAIN + tl.arange(0, REST if REST else 16), tl.arange(0, BLOCK_V)
    query += (row + row_offset)[:, None] * query_row + head[:, None] * query_head
    q = tl.load(query + d * query_dim, mask=valid[:, None] & (d < DIM), other=0.0)
    q_rest = tl.load(query + r * query_dim, mask=valid[:, None] & (r < DIM), other=0.0)
    length = tl.load(lengths + row)
    begin = _first_visible(length, window)
    low, high = _split_range(begin, length + count - 1, split, splits, SPLIT_SIZE, BLOCK_N)
    score_factor = tl.full([BLOCK_M], factor, tl.float32)
    if IS_FP8:
        q, q_rest, query_scale = _scaled_to_float16(q, q_rest)
        score_factor *= query_scale * key_scale
    score_scale = tl.full([BLOCK_M], 1.0, tl.float32) if IS_CAPPED else score_factor
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denom = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if sinks is not None and split == 0:
        row_max = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634 / score_scale
        denom += 1.0
    n = tl.arange(0, BLOCK_N)
    table = page_table + row * table_row
    # Prefetch page numbers one block ahead: an address that depends on a load of the same iteration halves the
    # number of pipeline buffers
    next_page = tl.load(table + (low + n) // PAGE, mask=(low + n >= begin) & (low + n < high), other=0)
    for start in tl.range(low, high, BLOCK_N):
        position = start + n
        key_mask = (position >= begin) & (position < high)
        page = next_page.to(tl.int64)
        next_page = tl.load(table + (position + BLOCK_N) // PAGE, mask=position + BLOCK_N < high, other=0)
        ptrs = (keys + page * key_page + position % PAGE * key_place + kv_head * key_head)[:, None]
        k = widened(
            tl.load(ptrs + d, mask=key_mask[:, None] & (d < DIM), other=0.0), key_scale, dtype, IS_SCALED, IS_FP8
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST:
            k_rest = tl.load(ptrs + r, mask=key_mask[:, None] & (r < DIM), other=0.0)
            k_rest = widened(k_rest, key_scale, dtype, IS_SCALED, IS_FP8)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        if IS_CAPPED:
            scores = capped(scores * score_factor[:, None], cap)
        if IS_LATENT:
            v = k
        else:
            ptrs = (values + page * value_page + position % PAGE * value_place + kv_head * value_head)[:, None]
            v = tl.load(ptrs + e, mask=key_mask[:, None] & (e < WIDTH), other=0.0)
            v = widened(v, value_scale, dtype, IS_SCALED, IS_FP8)
        scores = tl.where(key_mask, scores, float("-inf"))
        if ROWS > 1:
            visible = (position < (length + row_offset)[:, None]) & (
                position >= _first_visible(length + row_offset, window)[:, None]
            )
            scores = tl.where(visible, scores, float("-inf"))
        row_max, denom, acc = attended(scores, score_scale, v, row_max, denom, acc)
    if IS_FP8:
        acc *= key_scale if IS_LATENT else value_scale
    _store_split(
        output, partial, states, row + row_offset, head, split, e, valid, length, row_max * score_scale, denom, acc,
        output_row, output_head, splits, HEADS, WIDTH, IS_SPLIT,
    )  # fmt: skip


@triton.jit
def _store_split(
    output, partial, states, row, head, split, e, valid, length, row_max, denom, acc, output_row, output_head, splits,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """Store the output of a single split, or the partial sum and softmax state of one of several splits."""
    mask = valid[:, None] & (e < WIDTH)
    if not IS_SPLIT:
        acc = tl.where(length > 0, acc / denom[:, None], 0.0)
        ptrs = output + row[:, None] * output_row + head[:, None] * output_head + e
        tl.store(ptrs, acc.to(output.dtype.element_ty), mask=mask)
    else:
        slot = (row * HEADS + head) * splits + split
        tl.store(states + 2 * slot, row_max, mask=valid)
        tl.store(states + 2 * slot + 1, denom, mask=valid)
        tl.store(partial + slot[:, None] * WIDTH + e, acc, mask=mask)


@triton.jit
def _scaled_to_float16(q, q_rest):
    """Scale a 16-bit query [rows, ...] and its rest to float16 range.

    Returns both in float16, divided by a power of two per row, and that power [rows] in float32.
    """
    max_abs = tl.maximum(tl.max(tl.abs(q.to(tl.float32)), 1), tl.max(tl.abs(q_rest.to(tl.float32)), 1))
    bits = tl.minimum(tl.maximum(max_abs.to(tl.int32, bitcast=True) & 0x7F800000, 1 << 23), 253 << 23)
    inverse = ((254 << 23) - bits).to(tl.float32, bitcast=True)[:, None]
    power = bits.to(tl.float32, bitcast=True)
    return (q.to(tl.float32) * inverse).to(tl.float16), (q_rest.to(tl.float32) * inverse).to(tl.float16), power


@triton.jit
def attended(scores, score_scale, values, row_max, denom, acc):
    """Update the online-softmax state with a block of scores [M, N] and values [N, V]; arXiv:2205.14135.

    The softmax uses exp2 of ``scores`` times ``score_scale`` [M]; ``row_max`` is in units of ``scores``. The
    multiplication by ``score_scale`` and the subtraction of the maximum are one FMA, so rounding does not depend on the
    compiler. A block that does not raise the maximum leaves the state unchanged bit for bit, because both maxima are
    rounded the same way before the subtraction.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = tl.where(new_max == float("-inf"), 0.0, new_max * score_scale)
    weights = tl.exp2(tl.fma(scores, score_scale[:, None], -base[:, None]))
    rescale = tl.exp2(row_max * score_scale - base)  # compiled without FMA fusion
    acc = tl.dot(weights.to(values.dtype), values, acc * rescale[:, None], input_precision="ieee")
    return new_max, denom * rescale + tl.sum(weights, 1), acc


@triton.jit
def _accumulate_splits(
    denom, acc, base, partial, states, first, start, e, splits,
    WIDTH: tl.constexpr, MERGE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Accumulate denominator and sum of the MERGE_BLOCK splits from ``start`` on."""
    split = start + tl.arange(0, MERGE_BLOCK)
    row_max = tl.load(states + 2 * (first + split), mask=split < splits, other=float("-inf"))
    factor = tl.exp2(row_max - base)
    denom += tl.sum(factor * tl.load(states + 2 * (first + split) + 1, mask=split < splits, other=0.0), 0)
    mask = (row_max > float("-inf"))[:, None] & (e < WIDTH)  # the sum of a split without positions is ignored
    sums = tl.load(partial + (first + split)[:, None] * WIDTH + e, mask=mask, other=0.0)
    return denom, acc + tl.sum(factor[:, None] * sums, 0)


@triton.jit(do_not_specialize=["units"], do_not_specialize_on_alignment=["lengths", "num_active"])
def _merge_kernel(
    partial, states, lengths, output, codes, scales, num_active, output_row, output_head, units,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr,
    MOST: tl.constexpr, LEAST: tl.constexpr, IS_UE8M0: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one head of one request: rescale their sums to the common maximum and add them up.

    A program computes BLOCK_V features and is a single warp, so it needs no barriers.
    """
    wait_for_previous(IS_OVERLAPPED)
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    splits = SPLITS
    if num_active is not None:
        splits = _splits_per_request(num_active, units, splits)
        if row >= tl.load(num_active):
            return
    first = (row * tl.num_programs(0) + head) * splits
    e, split = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_S)
    row_max = tl.max(tl.load(states + 2 * (first + split), mask=split < splits, other=float("-inf")), 0)
    base = tl.where(row_max == float("-inf"), 0.0, row_max)
    denom, acc = 0.0, tl.zeros([BLOCK_V], tl.float32)
    if SPLITS <= 64:  # unrolled, so that all loads are in flight together
        for start in tl.static_range(0, SPLITS, _MERGE_BLOCK):
            denom, acc = _accumulate_splits(
                denom, acc, base, partial, states, first, start, e, splits, WIDTH, _MERGE_BLOCK
            )
    else:
        for start in range(0, SPLITS, _MERGE_BLOCK):
            denom, acc = _accumulate_splits(
                denom, acc, base, partial, states, first, start, e, splits, WIDTH, _MERGE_BLOCK
            )
    acc = tl.where(tl.load(lengths + row) > 0, acc / denom, 0.0)
    acc = acc.to(output.dtype.element_ty)
    tl.store(output + row * output_row + head * output_head + e, acc, mask=e < WIDTH)
    if codes is not None:  # quantize this group of 128 features
        group = row * tl.num_programs(0) + head + tl.arange(0, 1)[:, None]
        wide = acc.to(tl.float32)[None, :]
        store_quantized(wide, codes + group * 128 + e[None, :], scales + group, group >= 0, MOST, LEAST, IS_UE8M0)


_launch_decode, _launch_merge = Launcher(_decode_kernel, overlaps=True), Launcher(_merge_kernel, overlaps=True)
