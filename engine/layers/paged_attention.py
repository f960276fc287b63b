"""Attention: causal attention of packed rows over a paged KV cache.

:func:`attend` dispatches. Decode requests are computed as one batch by a kernel that reads the pages directly (C++ on a
CPU, Triton on a GPU), or else by torch's SDPA as one padded batch. Requests with several rows are computed by Triton on
a GPU, or else by SDPA one request at a time, in blocks of rows.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import handle_torch_function, has_torch_function

from tapscope.engine.distributed.sharding import HeadShards
from tapscope.engine.kv_cache.kv_cache import KVCache
from tapscope.engine.kv_cache.step_cache import MAX_ELEMENTS, Segment, StepCache, StepMasks
from tapscope.engine.layers.quantized import InputQuantizer
from tapscope.kernels import triton
from tapscope.kernels.cpu import paged_attention

MAX_HEAD_DIM = 256
"""Maximum head dim of the prefill kernel."""


class _Kernels(NamedTuple):
    decode: Callable[..., Tensor]
    prefill: Callable[..., Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention parameters of a layer."""

    scale: float
    """Factor of the scores, usually 1/sqrt(head dim)."""
    window: int | None = None
    """Sliding window: number of positions visible to a row, including its own; None: all earlier positions."""
    chunk: int | None = None
    """Chunk size: a row attends only within its own chunk (Llama 4); None: no chunks."""
    value_dim: int | None = None
    """If set, values are the first ``value_dim`` features of the keys (MLA latents); None: values are cached
    separately."""
    softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap) before the mask (Gemma 2, arXiv:2408.00118)."""
    sinks: Tensor | None = field(default=None, compare=False)
    """[heads]: a logit per head that takes part in the softmax but has no value (gpt-oss, arXiv:2309.17453)."""

    @property
    def is_plain(self) -> bool:
        """Whether torch's SDPA supports the parameters: no soft-cap and no sinks."""
        return self.softcap is None and self.sinks is None


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Context manager: disable torch's cuDNN attention backend.

    cuDNN builds a plan for every new shape, which takes tens of milliseconds, and the length of a decode request
    changes in each step.
    """
    backends: Any = torch.backends.cuda  # has no type hints
    was_enabled = backends.cudnn_sdp_enabled()
    backends.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        backends.enable_cudnn_sdp(was_enabled)


class Attention(nn.Module):
    """Attention core of a layer: writes the step's keys and values to the cache, then attends to the cache."""

    def __init__(self, layer: int, spec: AttentionSpec, heads: HeadShards) -> None:
        super().__init__()
        self.layer, self.spec = layer, spec
        self.tap_dims = {"in[query]": heads.queries.dims("num_heads", "d"), "out": "t h[tp]"}
        if not heads.keys.is_whole:  # replicated heads are sliced unevenly, which dims cannot express
            self.tap_dims |= dict.fromkeys(("in[key]", "in[value]"), heads.keys.dims("num_heads", "d"))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, past_key_values: StepCache) -> Tensor:
        """Attend with query [tokens, heads, d], key and value [tokens, kv_heads, d] -> [tokens, heads * d]."""
        past_key_values.write(self.layer, key, value)
        return attend(query, self.layer, past_key_values, self.spec).flatten(1)


def attend(query: Tensor, layer: int, cache: StepCache, spec: AttentionSpec) -> Tensor:
    """Attend with [tokens, heads, d] to the cache of ``layer`` -> [tokens, heads, value dim]; arXiv:1706.03762.

    The step's own keys and values must already be cached. Query head h reads KV head h // (heads / kv_heads).
    """
    if has_torch_function((query,)):  # overridden by a mode such as BatchInvariant
        return handle_torch_function(attend, (query,), query, layer, cache, spec)
    if spec.chunk is not None:
        singles = _attend_pages(query[: cache.num_single], layer, cache, spec) if cache.num_single else None
        if singles is None or cache.num_single == len(cache.segments):
            return attend_chunks(query, layer, cache, spec, attend_one) if singles is None else singles
        return torch.cat((singles, attend_chunks(query, layer, cache, spec, attend_one, cache.num_single)))
    if cache.is_padded:
        return _attend_padded(query, layer, cache, spec)
    outputs = _attend_single(query, layer, cache, spec)
    prompts = attend_prompts(query, layer, cache, spec)
    if prompts is not None:
        return torch.cat([*outputs, prompts]) if outputs else prompts
    for segment in cache.segments[sum(map(len, outputs)) :]:
        rows = slice(segment.slot, segment.slot + segment.count)
        start = segment.first_seen(spec.window)
        keys, values = cache.read(layer, segment, start)
        if spec.value_dim is not None:
            values = keys[..., : spec.value_dim]
        outputs.append(attend_segment(query[rows], keys, values, segment, start, spec, cache))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def attend_and_quantize(
    query: Tensor, layer: int, cache: StepCache, spec: AttentionSpec, quantizer: InputQuantizer
) -> Tensor:
    """Return :func:`attend`'s output as [tokens, heads * value dim], the input of the layer that owns ``quantizer``.

    If every request has one row, the attention kernel also quantizes the output.
    """
    is_whole = has_torch_function((query,)) or cache.is_padded or cache.num_single != len(query)
    quantized = None if is_whole else quantizer.offer(query.flatten(1))
    output = None if quantized is None else _attend_pages(query, layer, cache, spec, quantized)
    if output is None:
        return attend(query, layer, cache, spec).flatten(1)
    output = output.flatten(1)
    quantizer.keep(output, quantized)
    return output


def attend_chunks(
    query: Tensor,
    layer: int,
    cache: StepCache,
    spec: AttentionSpec,
    attend_one: Callable[..., Tensor],
    first_request: int = 0,
) -> Tensor:
    """Compute :func:`attend` with ``spec.chunk`` for requests from ``first_request`` on, one chunk at a time.

    ``attend_one`` computes the rows of one request and chunk.
    """
    assert spec.chunk is not None
    size, outputs = spec.chunk, []

    def attend_chain(query: Tensor, keys: Tensor, values: Tensor, diagonal: int, spec: AttentionSpec) -> Tensor:
        """Split rows by chunk and call ``attend_one`` for each; key 0 is the first key of a chunk."""
        parts, length = [], diagonal + len(query)
        for start in range(diagonal // size * size, length, size):
            first, end = max(start, diagonal), min(start + size, length)
            rows, seen = query[first - diagonal : end - diagonal], slice(start, end)
            parts.append(attend_one(rows, keys[seen], values[seen], first - start, spec))
        return torch.cat(parts)

    whole = replace(spec, chunk=None)
    for segment in cache.segments[first_request:]:
        begin = segment.base // size * size
        keys, values = cache.read(layer, segment, begin)
        rows = query[segment.slot : segment.slot + segment.count]
        if segment.tree:
            outputs.append(attend_branches(rows, keys, values, segment, begin, whole, attend_chain))
        else:
            outputs.append(attend_chain(rows, keys, values, segment.position - begin, whole))
    return torch.cat(outputs)


def attend_branches(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    segment: Segment,
    start: int,
    spec: AttentionSpec,
    attend_one: Callable[..., Tensor],
) -> Tensor:
    """Compute :func:`attend_tree` one branch at a time, with keys at the positions that they take on acceptance."""
    base, first = segment.base - start, len(segment.tree) - segment.count
    output = None
    for whole, own in segment.branches():
        seen = torch.tensor([*range(base), *(base + row for row in whole)], device=keys.device)
        rows = torch.tensor([row - first for row in own], device=keys.device)
        branch_output = attend_one(query[rows], keys[seen], values[seen], base + len(whole) - len(own), spec)
        output = branch_output.new_empty(len(query), *branch_output.shape[1:]) if output is None else output
        output[rows] = branch_output
    assert output is not None, "a tree has a branch"
    return output


def _attend_single(query: Tensor, layer: int, cache: StepCache, spec: AttentionSpec) -> list[Tensor]:
    """Attend for requests with one row as one batch [requests, heads, value dim], if faster; otherwise return []."""
    output = _attend_pages(query[: cache.num_single], layer, cache, spec) if cache.num_single else None
    if output is not None:
        return [output]
    batched = cache.num_batched(layer, spec.window)
    return [_attend_batch(query[:batched], layer, cache, spec)] if batched else []


def _attend_pages(
    query: Tensor, layer: int, cache: StepCache, spec: AttentionSpec, quantized: Any = None
) -> Tensor | None:
    """Attend for requests with one row in a C++ or Triton kernel that reads the pages; None if neither applies.

    ``quantized`` receives the quantized output, on a GPU.
    """
    pools, count = cache.pools(layer), len(query)
    if pools is None:
        return None
    keys, values = pools
    tables, scales = (cache.page_table_of(layer)[:count], cache.lengths[:count]), cache.scales(layer)
    if query.is_cpu:
        if not spec.is_plain or spec.chunk is not None:
            return None
        values = values if spec.value_dim is None else keys[..., : spec.value_dim]
        return paged_attention(query, keys, values, *tables, spec.scale, spec.window, stored_scales=scales)
    if why_not_paged(cache.cache) is not None:
        return None
    options = {"softcap": spec.softcap, "sinks": spec.sinks, "stored_scales": scales}
    options |= {"window": spec.window, "chunk": spec.chunk, "most_rows": cache.most_rows, "quantized": quantized}
    return _triton().decode(query, keys, values, *tables, spec.scale, value_dim=spec.value_dim, **options)


def attend_slots(
    query: Tensor, layer: int, cache: StepCache, slots: Tensor, counts: Tensor, spec: AttentionSpec
) -> Tensor:
    """Attend for requests with one row to selected positions: [requests, heads, d] -> [requests, heads, value dim].

    ``slots`` [requests, most] int32: slots of the positions, with the pool's page axes flattened; ``counts`` [requests]
    int32: number of valid slots. Uses the paged Triton decode kernel with pages of one position.
    """
    pools = cache.pools(layer)
    assert pools is not None, "a cache whose pages kernels can read"
    keys, values = (pool.flatten(0, 1).unsqueeze(1) for pool in pools)
    options = {"value_dim": spec.value_dim, "stored_scales": cache.scales(layer)}
    return _triton().decode(query, keys, values, slots, counts, spec.scale, **options)


def attend_prompts(
    query: Tensor, layer: int, cache: StepCache, spec: AttentionSpec, *, is_batch_invariant: bool = False
) -> Tensor | None:
    """Attend for requests with several rows in a Triton kernel that reads the pages; None if the kernel does not apply.

    With ``is_batch_invariant`` all requests are computed, so that a row's bits do not depend on its request's row
    count.
    """
    pools, first = cache.pools(layer), 0 if is_batch_invariant else cache.num_single
    query = query[first:]
    if not len(query) or query.is_cpu or pools is None or spec.value_dim is not None or query.shape[-1] > MAX_HEAD_DIM:
        return None
    if cache.has_trees or why_not_paged(cache.cache) is not None:
        return None
    starts = cache.starts if is_batch_invariant else cache.prompt_starts
    tables = cache.page_table_of(layer)[first:], starts, cache.lengths[first:]
    scales = cache.scales(layer)
    options = {"window": spec.window, "softcap": spec.softcap, "sinks": spec.sinks, "stored_scales": scales}
    return _triton().prefill(query, *pools, *tables, spec.scale, is_batch_invariant=is_batch_invariant, **options)


def _attend_padded(query: Tensor, layer: int, cache: StepCache, spec: AttentionSpec) -> Tensor:
    """Attend for decode requests and prompts in their kernels, when only the device knows how many requests decode."""
    pools, count = cache.pools(layer), cache.num_single
    assert pools is not None, "a cache that is split has no graphs"
    output = query.new_empty(*query.shape[:2], pools[1].shape[3])
    tables, lengths = cache.page_table_of(layer), cache.lengths
    options: dict[str, Any] = {"window": spec.window, "softcap": spec.softcap, "sinks": spec.sinks}
    options["stored_scales"] = cache.scales(layer)
    single = query[:count], *pools, tables[:count], lengths[:count], spec.scale
    num_active = cache.starts[count : count + 1]  # the first row after those of decode requests
    _triton().decode(*single, num_active=num_active, out=output[:count], **options)
    several = query, *pools, tables[count:], cache.starts[count:], lengths[count:], spec.scale
    return _triton().prefill(*several, num_prompts=1, out=output, **options)


def why_not_paged(cache: KVCache) -> str | None:
    """Return why kernels cannot read the pages of ``cache`` on its GPU, as the end of a sentence; None if they can."""
    if cache.is_split:
        return "part of each key is stored in a different dtype"
    if not (cache.kv_format.is_plain or cache.kv_format.is_fp8):
        return f"keys and values are stored in {cache.kv_format.stored} and computed in {cache.kv_format.computed}"
    return triton.why_not(cache.device)


@functools.cache
def _triton() -> _Kernels:
    from tapscope.kernels.triton import paged_decode, paged_prefill  # imports Triton

    return _Kernels(paged_decode.paged_decode, paged_prefill.paged_prefill)


def _attend_batch(query: Tensor, layer: int, cache: StepCache, spec: AttentionSpec) -> Tensor:
    """Attend for requests with one row as one padded SDPA call: [requests, heads, d] -> [requests, heads, value dim].

    The query heads of a group are folded into the row axis.
    """
    keys, values = cache.read_batch(layer, spec.window)
    if spec.value_dim is not None:
        values = keys[..., : spec.value_dim]
    k, v = keys.transpose(1, 2), values.transpose(1, 2)
    folded = query.reshape(len(query), k.shape[1], -1, query.shape[-1])
    bias = cache.batch_bias(layer, spec.window, query.dtype)
    return _attend_folded(folded, k, v, bias, spec).reshape(*query.shape[:2], -1)


def attend_segment(
    query: Tensor, keys: Tensor, values: Tensor, segment: Segment, start: int, spec: AttentionSpec, cache: StepCache
) -> Tensor:
    """Run :func:`attend_one`, or :func:`attend_tree` for a draft tree, for one request; key 0 is at ``start``."""
    if segment.tree:
        return attend_tree(query, keys, values, segment, start, spec, cache)
    return attend_one(query, keys, values, segment.position - start, spec, cache.masks)


def attend_tree(
    query: Tensor, keys: Tensor, values: Tensor, segment: Segment, start: int, spec: AttentionSpec, cache: StepCache
) -> Tensor:
    """Attend with each row of a draft tree to the cached positions and its branch -> [count, heads, value dim]."""
    if has_torch_function((query,)):
        return handle_torch_function(attend_tree, (query,), query, keys, values, segment, start, spec, cache)
    count, num_heads, dim = query.shape
    kv_heads, group = keys.shape[1], num_heads // keys.shape[1]
    mask = cache.tree_mask(segment, spec.window)[:, start:].repeat_interleave(group, 0)
    folded = query.view(count, kv_heads, group, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
    k, v = keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
    out = _attend_folded(folded, k, v, mask, spec)
    return out.view(kv_heads, count, group, -1).transpose(0, 1).reshape(count, num_heads, -1)


def attend_one(
    query: Tensor, keys: Tensor, values: Tensor, diagonal: int, spec: AttentionSpec, masks: StepMasks | None = None
) -> Tensor:
    """Attend for one request: [count, heads, d], keys and values [length, kv_heads, d] -> [count, heads, value dim].

    Row i is at key ``diagonal + i``. The query heads of a group are folded into the row axis, which on a CPU is several
    times faster than `enable_gqa`. Many rows are computed in blocks, each against the keys visible to its last row.
    """
    if has_torch_function((query,)):
        return handle_torch_function(attend_one, (query,), query, keys, values, diagonal, spec, masks)
    count, num_heads, dim = query.shape
    kv_heads = keys.shape[1]
    group = num_heads // kv_heads
    k, v = keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
    sees_all = spec.window is None or spec.window >= diagonal + count
    if count > 1 and not query.is_cpu and diagonal == 0 and spec.is_plain and sees_all:
        q = query.transpose(0, 1).unsqueeze(0)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale, enable_gqa=group > 1)
        return out[0].transpose(0, 1)
    folded = query.view(count, kv_heads, group, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
    if count == 1 and diagonal == len(keys) - 1:  # a decode row; the cache read has applied the window
        out = _attend_folded(folded, k, v, None, spec)
    else:
        out = _attend_pieces(folded, k, v, diagonal, group, spec, masks or StepMasks())
    return out.view(kv_heads, count, group, -1).transpose(0, 1).reshape(count, num_heads, -1)


def _attend_pieces(
    query: Tensor, keys: Tensor, values: Tensor, diagonal: int, group: int, spec: AttentionSpec, masks: StepMasks
) -> Tensor:
    """Attend in blocks of rows: [1, kv_heads, count * group, d] -> [kv_heads, count * group, value dim].

    Blocks skip most scores past the diagonal, fit a CPU's caches, and keep the mask below MAX_ELEMENTS (unless one row
    exceeds it). All blocks share one mask, right-aligned to a block's last key.
    """
    kv_heads, count = keys.shape[1], query.shape[2] // group
    seen = min(diagonal + count, spec.window or diagonal + count)
    rows = min(count, _piece_rows(group, kv_heads, torch.get_num_threads()))
    if not query.is_cpu:
        rows = min(count, max(1, MAX_ELEMENTS // (group * (seen + count))))
    width = seen + rows - 1
    dtype = query.dtype if query.is_cpu else torch.bool  # GPU kernels need aligned rows of an additive mask

    key = rows, width, spec.window, dtype, group
    mask = masks.get(key)
    if mask is None:
        mask = _piece_mask(rows, width, spec.window, dtype, query.device).repeat_interleave(group, 0)
        masks.add(key, mask)
    output = query.new_empty(kv_heads, count * group, values.shape[-1])
    for first in range(0, count, rows):
        end = min(first + rows, count)
        start = 0 if spec.window is None else max(0, diagonal + first - spec.window + 1)
        span, part = slice(start, diagonal + end), slice(first * group, end * group)
        last = width - rows + end - first
        own = mask[: (end - first) * group, last - (span.stop - span.start) : last]
        output[:, part] = _attend_folded(query[:, :, part], keys[:, :, span], values[:, :, span], own, spec)[0]
    return output


def _piece_rows(group: int, kv_heads: int, threads: int) -> int:
    """Return the rows per block: SDPA splits 192 or more folded rows by 64, and every thread should get a part."""
    return max(32, -(-max(192, 64 * threads // kv_heads) // group))


def _piece_mask(rows: int, width: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the mask [rows, width] in which the last row is at the last key.

    A bool mask is True at visible keys; any other dtype gives an additive mask, -inf at hidden keys and 0 elsewhere.
    """
    hidden = torch.ones(rows, width, dtype=torch.bool, device=device).triu_(width - rows + 1)
    if window is not None:
        hidden |= torch.ones(rows, width, dtype=torch.bool, device=device).tril_(width - rows - window)
    if dtype == torch.bool:
        return hidden.logical_not_()
    return torch.zeros(rows, width, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def _attend_folded(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """Attend with [n, kv_heads, rows * group, d] by SDPA, or eagerly with a soft-cap or sinks.

    ``mask`` is bool (True: visible) or additive.
    """
    if spec.is_plain:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=spec.scale)
    return _attend_eagerly(query, keys, values, mask, spec)


def _attend_eagerly(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """Attend with the roundings of `eager_attention_forward` in transformers' Gemma 2 and gpt-oss."""
    scores = query @ keys.mT * spec.scale
    if spec.softcap is not None:
        scores = (scores / spec.softcap).tanh() * spec.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if spec.sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ values
    sinks = spec.sinks.view(scores.shape[1], 1, -1, 1)  # per row: the heads of a row are adjacent
    by_row = scores.view(*scores.shape[:2], -1, sinks.shape[2], scores.shape[3])
    sinks = sinks.to(scores.dtype).expand(*by_row.shape[:-1], 1)
    weights = torch.cat((by_row, sinks), dim=-1).softmax(-1, dtype=torch.float32)
    return weights[..., :-1].flatten(2, 3).to(query.dtype) @ values
