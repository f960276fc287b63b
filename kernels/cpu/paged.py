"""paged_attention: one query row a request against keys and values in pages, which are read where they lie."""

import torch
from torch import Tensor

from tapscope.kernels.cpu.linear import in_profile, is_intercepted
from tapscope.kernels.native import library

_CODES = {torch.float32: library.CODES["float32"], torch.bfloat16: library.CODES["bfloat16"]}
_BYTES = {torch.float8_e4m3fn: library.CODES["float8_e4m3fn"], torch.float8_e5m2: library.CODES["float8_e5m2"]}
_MAX_SCALE = 2.0**100  # what is read is finite, in either type


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
    """[requests, heads, key dim] against pages -> [requests, heads, value dim]; None where C++ does not serve.

    ``keys`` and ``values`` are [pages, page_size, kv_heads, dim], ``values`` maybe the first features of ``keys``: in
    the query's dtype, or in FP8, whose numbers times ``stored_scales`` (of keys, of values) are rounded once to
    that. ``page_table`` [requests, most pages] and ``lengths`` [requests] are int32, and a request's query stands at
    its last position. It sees ``window`` positions, itself included, or all. Head h reads key/value head h // (heads /
    kv_heads). Sums and softmax are in float32; :func:`paged_reference` is the same in plain torch.
    """
    functions, code = library.functions(), _CODES.get(query.dtype)
    if functions is None or code is None or not len(query) or is_intercepted(query):
        return None
    if not all(tensor.is_cpu and tensor.is_contiguous() for tensor in (query, keys, page_table, lengths)):
        return None
    stored = code if keys.dtype == query.dtype else _BYTES.get(keys.dtype)
    if stored is None or keys.dtype != values.dtype or not _is_beside(values, keys) or max(stored_scales) > _MAX_SCALE:
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
    """The reference of :func:`paged_attention`: one request at a time."""
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


def _is_beside(values: Tensor, keys: Tensor) -> bool:
    """Whether both lie page by page, position by position and head by head."""
    pages, page_size, kv_heads, _ = values.shape
    step = values.stride(2)
    steps = page_size * kv_heads * step, kv_heads * step, step, 1
    return values.stride() == steps and keys.shape[:3] == (pages, page_size, kv_heads)
