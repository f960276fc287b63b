"""paged_attention: decode attention, with one query row per request, that reads keys and values in place from pages."""

import torch
from torch import Tensor

from tapscope.kernels.cpu.linear import in_profile, is_intercepted
from tapscope.kernels.native import library

_CODES = {torch.float32: library.CODES["float32"], torch.bfloat16: library.CODES["bfloat16"]}
_BYTES = {torch.float8_e4m3fn: library.CODES["float8_e4m3fn"], torch.float8_e5m2: library.CODES["float8_e5m2"]}
_MAX_SCALE = 2.0**100  # keeps scaled values finite in float32 and bfloat16


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None,
    *,
    stored_scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor | None:
    """Attend from queries [requests, heads, key dim] to pages -> [requests, heads, value dim]; None if not applicable.

    ``keys`` and ``values`` are [pages, page_size, kv_heads, dim]; ``values`` may be a view of the first features of
    ``keys``. They have the query's dtype or FP8; FP8 values are multiplied by ``stored_scales`` (keys, values) and
    rounded once to the query's dtype. ``page_table`` [requests, max pages] and ``lengths`` [requests] are int32. A
    request's query is at its last position and attends to the last ``window`` positions, including its own, or to all
    (None). Head h reads key/value head h // (heads / kv_heads). Sums and softmax are in float32.
    :func:`paged_reference` is the reference in plain PyTorch.
    """
    functions, code = library.functions(), _CODES.get(query.dtype)
    if functions is None or code is None or not len(query) or is_intercepted(query):
        return None
    if not all(tensor.is_cpu and tensor.is_contiguous() for tensor in (query, keys, page_table, lengths)):
        return None
    stored = code if keys.dtype == query.dtype else _BYTES.get(keys.dtype)
    if stored is None or keys.dtype != values.dtype or not _is_paged(values, keys) or max(stored_scales) > _MAX_SCALE:
        return None
    assert page_table.dtype == lengths.dtype == torch.int32, "page numbers and lengths are int32"
    (requests, heads, key_dim), (_, page_size, kv_heads, value_dim) = query.shape, values.shape
    output = query.new_empty(requests, heads, value_dim)
    addresses = (tensor.data_ptr() for tensor in (query, keys, values, page_table, lengths, output))
    sizes = requests, heads, kv_heads, key_dim, value_dim, values.stride(2), page_size, page_table.shape[1]
    threads = torch.get_num_threads()
    with in_profile("paged_attention"):
        done = functions.paged(*addresses, *sizes, window or 0, code, stored, threads, scale, *stored_scales)
    return output if done else None


def paged_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None,
    *,
    stored_scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """Compute :func:`paged_attention` in plain PyTorch, one request at a time."""
    if keys.dtype != query.dtype:
        keys, values = (
            (pool.float() * by).to(query.dtype) for pool, by in zip((keys, values), stored_scales, strict=True)
        )
    outputs = []
    for row, pages, length in zip(query, page_table, lengths.tolist(), strict=True):
        start = max(0, length - window) if window else 0
        group = len(row) // keys.shape[2]
        k, v = (pool[pages].flatten(0, 1)[start:length].repeat_interleave(group, 1) for pool in (keys, values))
        weights = torch.einsum("hd,thd->ht", row.float(), k.float()).mul(scale).softmax(-1)
        outputs.append(torch.einsum("ht,thd->hd", weights, v.float()).to(query.dtype))
    return torch.stack(outputs)


def _is_paged(values: Tensor, keys: Tensor) -> bool:
    """Return whether ``values`` is dense in page, position and head order, and has the pages and heads of ``keys``."""
    pages, page_size, kv_heads, _ = values.shape
    step = values.stride(2)
    steps = page_size * kv_heads * step, kv_heads * step, step, 1
    return values.stride() == steps and keys.shape[:3] == (pages, page_size, kv_heads)
