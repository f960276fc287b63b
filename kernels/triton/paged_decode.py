"""Paged decode attention: one query row a request against keys and values in pages, split along the sequence.

For request b, head h and its key/value head g = h // (heads / kv_heads), arXiv:1706.03762:

    scores[t] = cap(scale * query[b, h] . key[t, g])       t = first .. length - 1
    out[b, h] = sum_t softmax(scores)[t] * value[t, g]

first = max(0, length - window), or the first position of the chunk of the last one (Llama 4), or 0;
cap(s) = softcap * tanh(s / softcap) (Gemma 2, arXiv:2408.00118) or s; a sink adds exp(sinks[h]) to the softmax's
denominator and nothing to the sum (gpt-oss, arXiv:2309.17453). Position t of request b is in page
page_table[b, t // page_size] at t % page_size.

Each program takes one request, one key/value head and one part of the sequence (Flash-Decoding, Dao et al., 2023): it
keeps the running maximum, denominator and sum of arXiv:2205.14135, and a second kernel merges the parts. The grid
depends on shapes alone, so a CUDA graph may capture it; lengths are read on the device, and so is the number of
requests where only the device knows it: the programs are then distributed over those requests. Scores, softmax and sums
are in float32; the softmax's weights are rounded to the query's dtype before they meet the values.

Where a request may have several rows, as in verifying drafts, the program of its first row computes them all, so that
keys and values are read once; those of the other rows do nothing. Two rows side by side are of one request if their
lengths are consecutive and they share the page of the first one's last position: a page that a step writes belongs to
one request.
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
_SHORTEST = 64
"""Positions of a part, at the least."""
_ACTIVE_SPLITS = 4
"""Parts of each request at the least, if the number of requests is known on the device only."""
_MERGE_SIZE = 16
_MERGED = tl.constexpr(_MERGE_SIZE)
"""Parts that are merged at a time. Fixed: the order of the sum must not depend on the number of parts."""


class Launch(NamedTuple):
    """How the kernel is compiled for a class of shapes."""

    block: int
    """Positions of one iteration."""
    warps: int
    stages: int
    registers: int | None = None
    """Of a thread at most, so that more programs fit on a multiprocessor; None: as the compiler likes."""
    resident: int = 2
    """Programs that run on a multiprocessor at the same time; their registers allow it."""


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
"""By the key dim's class (up to 64, 128, 256 or more features), the bytes of a stored element, and whether more than 16
heads share a key/value head; benchmarks/tune_triton.py measures them. Nothing here depends on the batch:
batch-invariant results need that."""

SMALL_LAUNCHES = LAUNCHES | {
    (256, 2, False): Launch(64, 4, 2),
    (1024, 2, True): Launch(16, 8, 2, resident=1),
    (1024, 1, True): Launch(16, 8, 2, resident=1),
}
"""The same for GPUs with little shared memory."""


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
    """What :func:`paged_decode` computes, one request at a time; lengths are read on the host."""
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
    """[requests, heads, key dim] against pages -> [requests, heads, value dim], in the query's dtype.

    ``keys`` and ``values`` are [pages, page_size, kv_heads, dim], of any strides with the features side by side: in
    the query's dtype, or in FP8, whose numbers times ``stored_scales`` (of keys, of values) are rounded once to it.
    With ``value_dim`` the values are the first ``value_dim`` features of the keys (MLA, arXiv:2405.04434) and
    ``values`` is not read. ``page_table`` [requests, most pages] and ``lengths`` [requests] are int32 on the device; a
    request of length 0 is padding: none of its pages is read, and zeros are written. ``window`` counts the positions
    that a row sees, itself included; with ``chunk`` it sees those of its own chunk of that size. ``sinks`` is [heads].

    The sequence is cut into ``num_splits`` parts of equal size, by default as many as fill the device. With
    ``split_size`` parts are of that many positions instead, and a row's bits do not depend on the batch. ``quantized``
    receives what :func:`.quantize.quantize` computes from the output [requests, heads * value dim], in groups.

    ``num_active`` [1] int32 on the device: how many requests are computed, the first ones; the output of the others is
    left as it is. The number of programs does not depend on it: the fewer requests, the more parts each has.

    With ``most_rows`` up to that many rows side by side may be of one request, at consecutive positions whose keys and
    values this step has stored; they read them together where their heads fit into one program. A value that is not
    finite then reaches the earlier rows of its request too.
    Raises UsageError for tensors that do not fit together.
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
    most = 64 if keys.element_size() < 4 else 32
    together = most_rows if group * most_rows <= most else 1
    rows = min(most, max(16, next_power(group * together)))
    programs = keys.shape[2] * -(-group // rows)
    positions = page_table.shape[1] * keys.shape[1]
    launch, sms = _launch_of(query, keys, rows), num_sms(query.device)
    units = 0
    if split_size is not None:
        splits = _parts_of(split_size, positions)
    elif num_active is not None:
        splits = max(1, _splits(programs, positions, sms, launch) // _MERGE_SIZE) * _MERGE_SIZE
        units = max(_ACTIVE_SPLITS * len(query), splits)
    else:
        splits = num_splits or _splits(programs * max(1, -(-len(query) // together)), positions, sms, launch)
    if quantized is not None:
        quantized.check(len(query), output[0].numel())
    if len(query):
        tensors = query, keys, values, page_table, lengths, sinks, output
        numbers = *factors(scale, softcap), *stored_scales, window or -(chunk or 0)
        flags = {"IS_CAPPED": softcap is not None, "IS_LATENT": value_dim == key_blocks(keys.shape[3])[0]}
        is_merged = splits > 1 and output.shape[2] == GROUP  # a program of the merge then has a group
        merged = quantized if is_merged else None
        active = num_active, units
        _run(tensors, numbers, (programs, splits), (rows, together), split_size or 0, flags, merged, active)
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
    """Launch the kernel, and the one that merges the parts where there are several; it may quantize.

    ``sizes``: programs of a part, and parts of a request; ``rows``: of a program's block of scores, and of a request at
    most; ``active``: the number of requests on the device, and the parts of all of them.
    """
    query, keys, values, page_table, lengths, _, output = tensors
    (requests, heads, dim), (_, page_size, kv_heads, width), (programs, splits) = query.shape, values.shape, sizes
    (main, rest), launch = key_blocks(dim), _launch_of(query, keys, rows[0])
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
        grid, given = (heads, requests, -(-width // features)), blocks | Quantized.constants(quantized)
        _launch_merge(query.device, grid, args, given, num_warps=1)


def _check(
    query: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, lengths: Tensor, sinks: Tensor | None
) -> None:
    """Raise UsageError for tensors that do not fit together."""
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


def _parts_of(split_size: int, positions: int) -> int:
    """How many parts of ``split_size`` positions there may be."""
    if split_size <= 0 or split_size % 128:
        raise UsageError(f"split_size={split_size}: expected a positive multiple of 128")
    return max(1, -(-positions // split_size))


def _splits(programs: int, positions: int, sms: int, launch: Launch) -> int:
    """Parts of a sequence: as many as let all programs run at the same time. ``programs`` of one part.

    The merge adds up 16 parts at a time; a few more are not worth another round. Known from the shapes alone:
    ``positions`` is what the page table has room for.
    """
    splits = launch.resident * sms // programs
    rest = splits % _MERGE_SIZE
    if splits > _MERGE_SIZE and rest <= splits // 8:
        splits -= rest
    return max(1, min(MAX_SPLITS, splits, -(-positions // _SHORTEST)))


def factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """What products are multiplied by before and after tanh; scores are powers of 2, not of e."""
    log2e = math.log2(math.e)
    return (scale * log2e, 0.0) if softcap is None else (scale / softcap, softcap * log2e)


@functools.lru_cache(maxsize=64)
def key_blocks(dim: int) -> tuple[int, int]:
    """A key's features as one block and the rest, each a power of two of 16 or more: 576 = 512 + 64, 96 = 64 + 32."""
    main = max(16, 1 << (dim.bit_length() - 1))
    return main, max(16, next_power(dim - main)) if dim > main else 0


def _launch_of(query: Tensor, keys: Tensor, rows: int) -> Launch:
    """How the kernel is compiled for programs of ``rows`` rows."""
    launches = SMALL_LAUNCHES if has_small_shared_memory(query.device) else LAUNCHES
    dim = query.shape[2]
    return launches[
        64 if dim <= 64 else 128 if dim <= 128 else 256 if dim <= 256 else 1024, keys.element_size(), rows > 16
    ]


@triton.jit
def widened(stored, scale, dtype: tl.constexpr, IS_SCALED: tl.constexpr, IS_EXACT: tl.constexpr):
    """What was stored, in the type computed with: ``stored`` * ``scale``, rounded once; ``stored`` if exact."""
    if IS_SCALED and not IS_EXACT:
        wide = stored.to(tl.float32) * scale
        if dtype == tl.float16:  # no finite value becomes infinite
            wide = tl.where(wide > 65504.0, 65504.0, tl.where(wide < -65504.0, -65504.0, wide))
        return wide.to(dtype)
    else:
        return stored.to(dtype)


@triton.jit
def capped(scores, cap):
    """cap * tanh(scores)."""
    return cap - 2.0 * cap / (tl.exp2(scores * 2.8853900817779268) + 1.0)


@triton.jit
def _first_seen(length, window):
    """The first position that the last of ``length`` positions sees; a negative ``window`` is the size of a chunk."""
    begin = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    chunk = tl.maximum(-window, 1)
    return tl.where(window < 0, tl.maximum(length - 1, 0) // chunk * chunk, begin)


@triton.jit
def _span(begin, length, split, splits, SPLIT_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The positions [low, high) of this part, from a multiple of BLOCK_N on; [begin, length) are seen."""
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
    """Rows from ``row`` on that are of its request; 0 if the row before it is as well. ``i`` counts from 0 to ROWS."""
    at, is_row = row + i, (i < ROWS) & (row + i > 0) & (row + i < tl.num_programs(2))
    before = tl.load(lengths + at - 1, mask=is_row, other=0)
    follows = is_row & (before > 0) & (tl.load(lengths + at, mask=is_row, other=0) == before + 1)
    page = page_table + at * table_row + tl.maximum(before - 1, 0) // PAGE
    follows &= tl.load(page, mask=follows, other=0) == tl.load(page - table_row, mask=follows, other=0)
    count = tl.min(tl.where(follows | (i == 0) | (i >= ROWS), ROWS, i), 0)
    return tl.where(tl.max((follows & (i == 0)).to(tl.int32), 0) > 0, 0, count)


@triton.jit
def _share(num_active, units, splits):
    """Parts of each active request: its share of ``units``, at most ``splits``."""
    return tl.minimum(units // tl.maximum(tl.load(num_active), 1), splits)


_VIEWS = ["page_table", "lengths", "num_active"]
"""Of longer buffers, at any address, as wide as a step needs: the kernel is compiled once for all."""


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
    """One part of one request's sequence, for BLOCK_M heads that share a key/value head, or for those of ROWS rows."""
    wait_for_previous(IS_OVERLAPPED)
    BLOCKS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    dtype: tl.constexpr = tl.float16 if IS_FP8 else query.dtype.element_ty
    kv_head, split, row = tl.program_id(0) // BLOCKS, tl.program_id(1), tl.program_id(2).to(tl.int64)
    m, count = tl.arange(0, BLOCK_M), 1
    if num_active is not None:
        splits = _share(num_active, tl.num_programs(1), splits)
        row, split = (split // splits).to(tl.int64), split % splits
        count = (row < tl.load(num_active)).to(tl.int32)
    elif ROWS > 1:
        count = _rows_of_request(lengths, page_table, row, table_row, m, ROWS, PAGE)
    if count == 0:
        return
    if ROWS > 1:
        member, own = m % GROUP, m // GROUP
        real = own < count
    else:
        member, own = tl.program_id(0) % BLOCKS * BLOCK_M + m, 0 * m
        real = member < GROUP
    head = kv_head * GROUP + member
    d, r, e = tl.arange(0, MAIN), MAIN + tl.arange(0, REST if REST else 16), tl.arange(0, BLOCK_V)
    query += (row + own)[:, None] * query_row + head[:, None] * query_head
    q = tl.load(query + d * query_dim, mask=real[:, None] & (d < DIM), other=0.0)
    q_rest = tl.load(query + r * query_dim, mask=real[:, None] & (r < DIM), other=0.0)
    length = tl.load(lengths + row)
    begin = _first_seen(length, window)
    low, high = _span(begin, length + count - 1, split, splits, SPLIT_SIZE, BLOCK_N)
    before = tl.full([BLOCK_M], factor, tl.float32)
    if IS_FP8:
        q, q_rest, power = _in_float16(q, q_rest)
        before *= power * key_scale
    by = tl.full([BLOCK_M], 1.0, tl.float32) if IS_CAPPED else before
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if sinks is not None and split == 0:
        top = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634 / by
        total += 1.0
    n = tl.arange(0, BLOCK_N)
    table = page_table + row * table_row
    # Pages are loaded one block ahead: an address that needs a load of the same iteration halves the stages' buffers
    next_page = tl.load(table + (low + n) // PAGE, mask=(low + n >= begin) & (low + n < high), other=0)
    for start in tl.range(low, high, BLOCK_N):
        place = start + n
        seen = (place >= begin) & (place < high)
        page = next_page.to(tl.int64)
        next_page = tl.load(table + (place + BLOCK_N) // PAGE, mask=place + BLOCK_N < high, other=0)
        at = (keys + page * key_page + place % PAGE * key_place + kv_head * key_head)[:, None]
        k = widened(tl.load(at + d, mask=seen[:, None] & (d < DIM), other=0.0), key_scale, dtype, IS_SCALED, IS_FP8)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST:
            k_rest = tl.load(at + r, mask=seen[:, None] & (r < DIM), other=0.0)
            k_rest = widened(k_rest, key_scale, dtype, IS_SCALED, IS_FP8)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        if IS_CAPPED:
            scores = capped(scores * before[:, None], cap)
        if IS_LATENT:
            v = k
        else:
            at = (values + page * value_page + place % PAGE * value_place + kv_head * value_head)[:, None]
            v = tl.load(at + e, mask=seen[:, None] & (e < WIDTH), other=0.0)
            v = widened(v, value_scale, dtype, IS_SCALED, IS_FP8)
        scores = tl.where(seen, scores, float("-inf"))
        if ROWS > 1:
            sees = (place < (length + own)[:, None]) & (place >= _first_seen(length + own, window)[:, None])
            scores = tl.where(sees, scores, float("-inf"))
        top, total, mixed = attended(scores, by, v, top, total, mixed)
    if IS_FP8:
        mixed *= key_scale if IS_LATENT else value_scale
    _store(
        output, partial, states, row + own, head, split, e, real, length, top * by, total, mixed,
        output_row, output_head, splits, HEADS, WIDTH, IS_SPLIT,
    )  # fmt: skip


@triton.jit
def _store(
    output, partial, states, row, head, split, e, real, length, top, total, mixed, output_row, output_head, splits,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """The output where there is one part, else what the merge needs of this one."""
    written = real[:, None] & (e < WIDTH)
    if not IS_SPLIT:
        mixed = tl.where(length > 0, mixed / total[:, None], 0.0)
        at = output + row[:, None] * output_row + head[:, None] * output_head + e
        tl.store(at, mixed.to(output.dtype.element_ty), mask=written)
    else:
        part = (row * HEADS + head) * splits + split
        tl.store(states + 2 * part, top, mask=real)
        tl.store(states + 2 * part + 1, total, mask=real)
        tl.store(partial + part[:, None] * WIDTH + e, mixed, mask=written)


@triton.jit
def _in_float16(q, q_rest):
    """A 16-bit query [rows, ...] and its rest, divided by a power of two of each row to fit into float16, and it."""
    most = tl.maximum(tl.max(tl.abs(q.to(tl.float32)), 1), tl.max(tl.abs(q_rest.to(tl.float32)), 1))
    bits = tl.minimum(tl.maximum(most.to(tl.int32, bitcast=True) & 0x7F800000, 1 << 23), 253 << 23)
    inverse = ((254 << 23) - bits).to(tl.float32, bitcast=True)[:, None]
    power = bits.to(tl.float32, bitcast=True)
    return (q.to(tl.float32) * inverse).to(tl.float16), (q_rest.to(tl.float32) * inverse).to(tl.float16), power


@triton.jit
def attended(scores, by, values, top, total, mixed):
    """The running state after a block of scores [M, N] and values [N, V]; arXiv:2205.14135.

    Scores times ``by`` [M] are powers of 2; ``top`` is in the units of ``scores``. A score's product is taken together
    with the difference from the maximum, in one rounding, which leaves compilers no choice. A block that raises no
    maximum keeps the state to the bit: both maxima are rounded alike before their difference is taken.
    """
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher * by)
    weights = tl.exp2(tl.fma(scores, by[:, None], -base[:, None]))
    kept = tl.exp2(top * by - base)  # compiled without fusion to FMA
    mixed = tl.dot(weights.to(values.dtype), values, mixed * kept[:, None], input_precision="ieee")
    return higher, total * kept + tl.sum(weights, 1), mixed


@triton.jit
def _added(
    total, mixed, base, partial, states, first, start, e, splits,
    WIDTH: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Denominator and sum after the MERGED parts from ``start`` on."""
    part = start + tl.arange(0, MERGED)
    top = tl.load(states + 2 * (first + part), mask=part < splits, other=float("-inf"))
    factor = tl.exp2(top - base)
    total += tl.sum(factor * tl.load(states + 2 * (first + part) + 1, mask=part < splits, other=0.0), 0)
    full = (top > float("-inf"))[:, None] & (e < WIDTH)  # a part without positions has no sum
    sums = tl.load(partial + (first + part)[:, None] * WIDTH + e, mask=full, other=0.0)
    return total, mixed + tl.sum(factor[:, None] * sums, 0)


@triton.jit(do_not_specialize=["units"], do_not_specialize_on_alignment=["lengths", "num_active"])
def _merge_kernel(
    partial, states, lengths, output, codes, scales, num_active, output_row, output_head, units,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr,
    MOST: tl.constexpr, LEAST: tl.constexpr, IS_UE8M0: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Features of one head of one request: the parts' sums, brought to the highest of their maxima and added up.

    A program is one warp, so that nothing waits for other warps.
    """
    wait_for_previous(IS_OVERLAPPED)
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    splits = SPLITS
    if num_active is not None:
        splits = _share(num_active, units, splits)
        if row >= tl.load(num_active):
            return
    first = (row * tl.num_programs(0) + head) * splits
    e, every = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_S)
    highest = tl.max(tl.load(states + 2 * (first + every), mask=every < splits, other=float("-inf")), 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total, mixed = 0.0, tl.zeros([BLOCK_V], tl.float32)
    if SPLITS <= 64:  # unrolled: all loads are in flight together
        for start in tl.static_range(0, SPLITS, _MERGED):
            total, mixed = _added(total, mixed, base, partial, states, first, start, e, splits, WIDTH, _MERGED)
    else:
        for start in range(0, SPLITS, _MERGED):
            total, mixed = _added(total, mixed, base, partial, states, first, start, e, splits, WIDTH, _MERGED)
    mixed = tl.where(tl.load(lengths + row) > 0, mixed / total, 0.0)
    mixed = mixed.to(output.dtype.element_ty)
    tl.store(output + row * output_row + head * output_head + e, mixed, mask=e < WIDTH)
    if codes is not None:  # of a group of 128 features
        group = row * tl.num_programs(0) + head + tl.arange(0, 1)[:, None]
        wide = mixed.to(tl.float32)[None, :]
        store_quantized(wide, codes + group * 128 + e[None, :], scales + group, group >= 0, MOST, LEAST, IS_UE8M0)


_launch_decode, _launch_merge = Launcher(_decode_kernel, overlaps=True), Launcher(_merge_kernel, overlaps=True)
