"""Inputs of a step from the vectors that the host has copied: token ids, places in the KV cache, and page tables.

    id[t]    = ids[t], or last_tokens[-1 - ids[t], rows[t]] where ids[t] < 0     of the step before, on the device
    slot[t]  = table[rows[t], place // page_size] * page_size + place % page_size         place = places[t]
    pages[r] = table[table_rows[r], :num_pages]

One launch in the place of twelve of torch, which a short step waits for. It also waits when the stream changes from
kernels to copies between host and device, some 5 us each time, so that kernels read and write pinned host memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.launch import Launcher, check_device, check_same_device

_BLOCK = 1024


Tokens = tuple[Tensor, Tensor, Tensor]
"""(ids, rows, places), [tokens] int64 each, contiguous: token ids; each token's request, as a row of the page table and
of the tokens sampled last; where in its request the token's key and value are stored."""


def step_inputs_reference(
    tokens: Tokens, table_rows: Tensor, table: Tensor, page_size: int, num_pages: int, last_tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What :func:`step_inputs` computes."""
    ids, rows, places = tokens
    slots = table[rows, places // page_size].to(torch.int64) * page_size + places % page_size
    known = torch.where(ids < 0, last_tokens[(-1 - ids).clamp(min=0), rows], ids)
    return known, slots, table[:, :num_pages].index_select(0, table_rows)


def step_inputs(
    tokens: Tokens, table_rows: Tensor, table: Tensor, page_size: int, num_pages: int, last_tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(ids [tokens] int64, slots [tokens] int64, pages [requests, num_pages] int32).

    ``table`` [rows, most pages] int32 holds each request's pages in order of position; ``table_rows`` [requests] int32
    are the rows of the step's requests, and ``last_tokens`` [kinds, rows] int64 the tokens of each that the device
    computed last. Raises UsageError for tensors that do not fit together.
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
    """Raise UsageError for tensors that do not fit together."""
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
"""Of a longer buffer, at any address: the kernel is compiled once for all."""


@triton.jit(
    do_not_specialize=["tokens", "requests", "width", "table_row", "last_row"], do_not_specialize_on_alignment=_VIEWS
)
def _step_inputs_kernel(
    ids, rows, places, table_rows, table, last_tokens, chosen, slots, pages, tokens, requests, width, table_row,
    last_row, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token, and BLOCK pages of one request."""
    number, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if (number < tokens) & (tl.program_id(1) == 0):
        row, token, place = tl.load(rows + number), tl.load(ids + number), tl.load(places + number)
        kind = tl.maximum(-1 - token, 0)
        tl.store(chosen + number, tl.where(token < 0, tl.load(last_tokens + kind * last_row + row), token))
        page = tl.load(table + row * table_row + place // PAGE).to(tl.int64)
        tl.store(slots + number, page * PAGE + place % PAGE)
    if number < requests:
        row = tl.load(table_rows + number).to(tl.int64)
        used = tl.load(table + row * table_row + column, mask=column < width, other=0)
        tl.store(pages + number * width + column, used, mask=column < width)


def read_host(
    longs: tuple[Tensor, Tensor], ints: tuple[Tensor, Tensor], num_ids: int = 0, last_tokens: Tensor | None = None
) -> None:
    """Copy (vector in pinned memory, vector on the device) of int64 and of int32, contiguous, in one launch.

    The first ``num_ids`` of int64 are token ids: those below 0 are replaced as by :func:`step_inputs`. As many other
    numbers follow, then their rows. The pinned vectors must not change before the kernel has run. Raises UsageError for
    vectors that do not fit.
    """
    for (host, out), dtype in ((longs, torch.int64), (ints, torch.int32)):
        if host.dtype != dtype or out.dtype != dtype or host.shape != out.shape:
            raise UsageError(f"host {host.dtype} {list(host.shape)} and out {out.dtype} {list(out.shape)} do not fit")
    if num_ids and (last_tokens is None or len(longs[0]) < 3 * num_ids):
        raise UsageError(f"{num_ids} ids in {len(longs[0])} numbers: expected last_tokens, and a row for each id")
    device, counts = longs[1].device, (len(longs[1]), len(ints[1]), num_ids)
    check_device(device)
    if most := max(counts):
        last = longs[1] if last_tokens is None else last_tokens
        args = *longs, *ints, last, *counts, last.stride(0)
        _launch_read(device, (-(-most // _BLOCK), 1, 1), args, {"BLOCK": _BLOCK}, num_warps=4)


def store_tokens(tokens: Tensor, rows: Tensor, last_tokens: Tensor, host: Tensor) -> None:
    """``last_tokens[rows[i]] = host[i] = tokens[i]``, contiguous vectors of int64; ``host`` is in pinned memory.

    ``rows`` and ``host`` may be longer than ``tokens``. Raises UsageError where they are shorter.
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
    """BLOCK elements of each vector."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number, row = tl.load(long_host + i, mask=i < num_longs), tl.load(long_host + 2 * num_ids + i, mask=i < num_ids)
    is_pending = (i < num_ids) & (number < 0)
    known = tl.load(last_tokens + (-1 - number) * last_row + row, mask=is_pending)
    tl.store(long_out + i, tl.where(is_pending, known, number), mask=i < num_longs)
    tl.store(int_out + i, tl.load(int_host + i, mask=i < num_ints), mask=i < num_ints)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows", "tokens"])
def _store_tokens_kernel(tokens, rows, last_tokens, host, count, BLOCK: tl.constexpr):
    """BLOCK tokens."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + i, mask=i < count)
    tl.store(last_tokens + tl.load(rows + i, mask=i < count), token, mask=i < count)
    tl.store(host + i, token, mask=i < count)


_launch, _launch_read, _launch_store = map(Launcher, (_step_inputs_kernel, _read_host_kernel, _store_tokens_kernel))
