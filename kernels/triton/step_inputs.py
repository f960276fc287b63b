"""Step inputs computed on the device: token ids, KV-cache slots and page tables, from vectors prepared by the host.

    id[t]    = ids[t], or if ids[t] < 0 last_tokens[-1 - ids[t], rows[t]]        sampled by the previous step
    slot[t]  = table[rows[t], place // page_size] * page_size + place % page_size         place = places[t]
    pages[r] = table[table_rows[r], :num_pages]

One launch replaces twelve PyTorch launches, whose latency a short step cannot hide. Each change of a stream from
kernels to host/device copies also costs about 5 us, so kernels access pinned host memory directly instead.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.launch import Launcher, check_device, check_same_device

_BLOCK = 1024


Tokens = tuple[Tensor, Tensor, Tensor]
"""(ids, rows, places), contiguous [tokens] int64 each.

``ids`` are token ids. ``rows`` is each token's request, as a row of the page table and of the last sampled tokens.
``places`` is the position in the request at which the token's key and value are stored.
"""


def step_inputs_reference(
    tokens: Tokens, table_rows: Tensor, table: Tensor, page_size: int, num_pages: int, last_tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`step_inputs` in plain PyTorch."""
    ids, rows, places = tokens
    slots = table[rows, places // page_size].to(torch.int64) * page_size + places % page_size
    token_ids = torch.where(ids < 0, last_tokens[(-1 - ids).clamp(min=0), rows], ids)
    return token_ids, slots, table[:, :num_pages].index_select(0, table_rows)


def step_inputs(
    tokens: Tokens, table_rows: Tensor, table: Tensor, page_size: int, num_pages: int, last_tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (ids [tokens] int64, slots [tokens] int64, pages [requests, num_pages] int32) of a step.

    ``table`` [rows, max pages] int32 holds each request's pages in order of position; ``table_rows`` [requests] int32
    are the table rows of the step's requests. ``last_tokens`` [kinds, rows] int64 holds the last tokens of each kind
    that the device computed for each row. Raises UsageError for inconsistent tensors.
    """
    _check(tokens, table_rows, table, num_pages, last_tokens)
    ids, slots = torch.empty_like(tokens[0]), torch.empty_like(tokens[0])
    pages = torch.empty(len(table_rows), num_pages, dtype=torch.int32, device=table.device)
    grid = max(len(ids), len(pages)), max(1, -(-num_pages // _BLOCK)), 1
    args = (
        *tokens,
        table_rows,
        table,
        last_tokens,
        ids,
        slots,
        pages,
        len(ids),
        len(pages),
        num_pages,
        table.stride(0),
        last_tokens.stride(0),
    )
    if grid[0]:
        sizes = {"PAGE": page_size, "BLOCK": _BLOCK}
        _launch(table.device, grid, args, sizes, num_warps=4)
    return ids, slots, pages


def _check(tokens: Tokens, table_rows: Tensor, table: Tensor, num_pages: int, last_tokens: Tensor) -> None:
    """Raise UsageError for inconsistent shapes, dtypes, strides or devices."""
    check_same_device(*tokens, table_rows, table, last_tokens)
    wanted = [(name, vector, torch.int64) for name, vector in zip(("ids", "rows", "places"), tokens, strict=True)]
    wanted += [("table_rows", table_rows, torch.int32)]
    if last_tokens.ndim != 2 or last_tokens.dtype != torch.int64 or not last_tokens.is_contiguous():
        raise UsageError(f"last_tokens {last_tokens.dtype} {list(last_tokens.shape)}: expected contiguous int64 rows")
    for name, vector, dtype in wanted:
        if vector.ndim != 1 or vector.dtype != dtype or not vector.is_contiguous():
            raise UsageError(f"{name} is {vector.dtype} {list(vector.shape)}; expected a contiguous vector of {dtype}")
    if len({len(vector) for vector in tokens}) != 1:
        raise UsageError(
            f"{' and '.join(str(len(vector)) for vector in tokens)} ids, rows and places: one of each a token"
        )
    if table.ndim != 2 or table.dtype != torch.int32 or table.stride(1) != 1 or not 0 <= num_pages <= table.shape[1]:
        raise UsageError(f"table {table.dtype} {list(table.shape)}: expected int32 [rows, {num_pages} or more pages]")


_VIEWS = ["ids", "rows", "places", "table_rows"]
"""Arguments that are views of larger buffers, at any address: not specialized on alignment, to avoid recompilation."""


@triton.jit(
    do_not_specialize=["tokens", "requests", "width", "table_row", "last_row"], do_not_specialize_on_alignment=_VIEWS
)
def _step_inputs_kernel(
    ids, rows, places, table_rows, table, last_tokens, chosen, slots, pages, tokens, requests, width, table_row,
    last_row, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute id and slot of one token, and copy BLOCK pages of one request."""
    number, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if (number < tokens) & (tl.program_id(1) == 0):
        row, token, place = tl.load(rows + number), tl.load(ids + number), tl.load(places + number)
        kind = tl.maximum(-1 - token, 0)
        tl.store(chosen + number, tl.where(token < 0, tl.load(last_tokens + kind * last_row + row), token))
        page = tl.load(table + row * table_row + place // PAGE).to(tl.int64)
        tl.store(slots + number, page * PAGE + place % PAGE)
    if number < requests:
        row = tl.load(table_rows + number).to(tl.int64)
        page_ids = tl.load(table + row * table_row + column, mask=column < width, other=0)
        tl.store(pages + number * width + column, page_ids, mask=column < width)


def read_host(
    longs: tuple[Tensor, Tensor], ints: tuple[Tensor, Tensor], num_ids: int = 0, last_tokens: Tensor | None = None
) -> None:
    """Copy an int64 and an int32 vector from pinned host memory to the device in one launch.

    ``longs`` and ``ints`` are pairs (pinned host vector, device vector), contiguous. The first ``num_ids`` int64 values
    are token ids, of which negative ones are replaced as in :func:`step_inputs`. ``num_ids`` other values follow, then
    the rows of the ids. The host vectors must not change before the kernel has run. Raises UsageError for inconsistent
    vectors.
    """
    for (host, out), dtype in ((longs, torch.int64), (ints, torch.int32)):
        if host.dtype != dtype or out.dtype != dtype or host.shape != out.shape:
            raise UsageError(f"host {host.dtype} {list(host.shape)} and out {out.dtype} {list(out.shape)} do not fit")
    if num_ids and (last_tokens is None or len(longs[0]) < 3 * num_ids):
        raise UsageError(f"{num_ids} ids in {len(longs[0])} numbers: expected last_tokens, and a row for each id")
    device, counts = longs[1].device, (len(longs[1]), len(ints[1]), num_ids)
    check_device(device)
    if longest := max(counts):
        last = longs[1] if last_tokens is None else last_tokens
        args = *longs, *ints, last, *counts, last.stride(0)
        _launch_read(device, (-(-longest // _BLOCK), 1, 1), args, {"BLOCK": _BLOCK}, num_warps=4)


def store_tokens(tokens: Tensor, rows: Tensor, last_tokens: Tensor, host: Tensor) -> None:
    """Store ``last_tokens[rows[i]] = host[i] = tokens[i]`` for contiguous int64 vectors; ``host`` is in pinned memory.

    ``rows`` and ``host`` may be longer than ``tokens``. Raises UsageError if one of them is shorter.
    """
    check_device(tokens.device)
    count = len(tokens)
    if len(rows) < count or len(host) < count:
        raise UsageError(f"{count} tokens, {len(rows)} rows and room for {len(host)} on the host")
    if count:
        args = tokens, rows, last_tokens, host, count
        _launch_store(tokens.device, (-(-count // _BLOCK), 1, 1), args, {"BLOCK": _BLOCK}, num_warps=4)


@triton.jit(
    do_not_specialize=["num_longs", "num_ints", "num_ids", "last_row"],
    do_not_specialize_on_alignment=["long_out", "int_out", "last_tokens"],
)
def _read_host_kernel(
    long_host, long_out, int_host, int_out, last_tokens, num_longs, num_ints, num_ids, last_row, BLOCK: tl.constexpr
):  # fmt: skip
    """Copy BLOCK elements of each vector."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number, row = tl.load(long_host + i, mask=i < num_longs), tl.load(long_host + 2 * num_ids + i, mask=i < num_ids)
    is_pending = (i < num_ids) & (number < 0)
    last_token = tl.load(last_tokens + (-1 - number) * last_row + row, mask=is_pending)
    tl.store(long_out + i, tl.where(is_pending, last_token, number), mask=i < num_longs)
    tl.store(int_out + i, tl.load(int_host + i, mask=i < num_ints), mask=i < num_ints)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows", "tokens"])
def _store_tokens_kernel(tokens, rows, last_tokens, host, count, BLOCK: tl.constexpr):
    """Store BLOCK tokens."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + i, mask=i < count)
    tl.store(last_tokens + tl.load(rows + i, mask=i < count), token, mask=i < count)
    tl.store(host + i, token, mask=i < count)


_launch, _launch_read, _launch_store = map(Launcher, (_step_inputs_kernel, _read_host_kernel, _store_tokens_kernel))
