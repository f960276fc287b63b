"""Attention: causal attention of packed rows against a paged KV cache.

:func:`attend` is the one place where it is computed. It is told nothing but tensors on the device and an
:class:`AttentionSpec`. Requests that decode are computed at once, by C++ on a CPU and by Triton on a GPU, which read
the pages; where these cannot, by torch's SDPA as one padded batch. The others are computed by Triton, too, on a CPU by
SDPA one at a time, many rows by pieces.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import handle_torch_function, has_torch_function

from tapscope.engine.distributed.sharding import HeadShards
from tapscope.engine.kv_cache.attention_masks import MOST_ELEMENTS, StepMasks
from tapscope.engine.kv_cache.kv_cache import KVCache
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.kernels import triton
from tapscope.kernels.cpu import paged_attention

_MOST_FEATURES = 256
"""Of a head, in the kernel for prompts."""


class _Kernels(NamedTuple):
    decode: Callable[..., Tensor]
    prefill: Callable[..., Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What a layer's attention is, beside its tensors."""

    scale: float
    """Factor of the scores, 1/sqrt(head dim) as a rule."""
    window: int | None = None
    """Positions a row sees, itself included: the last ``window``; None for all before it."""
    value_dim: int | None = None
    """The values are the first ``value_dim`` features of the keys (MLA, whose latent is both); None: cached apart."""
    softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap) before the mask (Gemma 2, arXiv:2408.00118)."""


@contextmanager
def without_plans() -> Iterator[None]:
    """Leave cuDNN out of torch's choice of attention kernels.

    It builds a plan, for tens of milliseconds, for every shape it has not seen, and a request that decodes has another
    length in each step.
    """
    choice: Any = torch.backends.cuda  # has no type hints
    was_enabled = choice.cudnn_sdp_enabled()
    choice.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        choice.enable_cudnn_sdp(was_enabled)


class Attention(nn.Module):
    """Writes the step's keys and values into the cache and attends to what each row may see."""

    def __init__(self, layer: int, spec: AttentionSpec, heads: HeadShards) -> None:
        super().__init__()
        self.layer, self.spec = layer, spec
        self.tap_dims = {"in[query]": heads.queries.dims("num_heads", "d"), "out": "t h[tp]"}
        if not heads.keys.is_whole:  # else the heads cut out of them are copies of unequal number, which dims lack
            self.tap_dims |= dict.fromkeys(("in[key]", "in[value]"), heads.keys.dims("num_heads", "d"))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, past_key_values: StepCache) -> Tensor:
        """[tokens, heads, d] with [tokens, kv_heads, d] twice -> [tokens, heads * d], in the query's dtype."""
        past_key_values.write(self.layer, key, value)
        return attend(query, self.layer, past_key_values, self.spec).flatten(1)


def attend(query: Tensor, layer: int, cache: StepCache, spec: AttentionSpec) -> Tensor:
    """[tokens, heads, d] against the cache of ``layer`` -> [tokens, heads, value dim]; arXiv:1706.03762.

    The step's own keys and values are in the cache already. Head h reads key/value head h // (heads / kv_heads).
    """
    if has_torch_function((query,)):  # a mode such as BatchInvariant has its own
        return handle_torch_function(attend, (query,), query, layer, cache, spec)
    outputs = _attend_single(query, layer, cache, spec)
    prompts = _attend_prompts(query[cache.num_single :], layer, cache, spec)
    if prompts is not None:
        return torch.cat([*outputs, prompts]) if outputs else prompts
    for segment in cache.segments[sum(map(len, outputs)) :]:
        rows = slice(segment.slot, segment.slot + segment.count)
        start = 0 if spec.window is None else max(0, segment.position - spec.window + 1)
        keys, values = cache.read(layer, segment, start)
        if spec.value_dim is not None:
            values = keys[..., : spec.value_dim]
        outputs.append(attend_one(query[rows], keys, values, segment.position - start, spec, cache.masks))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_single(query: Tensor, layer: int, cache: StepCache, spec: AttentionSpec) -> list[Tensor]:
    """The first requests, those of one row, at once where that is the faster way: [requests, heads, value dim]."""
    output = _attend_pages(query[: cache.num_single], layer, cache, spec) if cache.num_single else None
    if output is not None:
        return [output]
    batched = cache.num_batched(spec.window)
    return [_attend_batch(query[:batched], layer, cache, spec)] if batched else []


def _attend_pages(query: Tensor, layer: int, cache: StepCache, spec: AttentionSpec) -> Tensor | None:
    """One row of each request straight from the pages, by C++ or by Triton; None where neither can."""
    pools, count = cache.pools(layer), len(query)
    if pools is None:
        return None
    keys, values = pools
    tables, scales = (cache.page_table[:count], cache.lengths[:count]), cache.scales(layer)
    if query.is_cpu:
        if spec.softcap is not None:
            return None
        values = values if spec.value_dim is None else keys[..., : spec.value_dim]
        return paged_attention(query, keys, values, *tables, spec.scale, spec.window, stored_scales=scales)
    if why_no_pages(cache.cache) is not None:
        return None
    more = {"window": spec.window, "softcap": spec.softcap, "value_dim": spec.value_dim, "stored_scales": scales}
    return _triton().decode(query, keys, values, *tables, spec.scale, **more)


def _attend_prompts(query: Tensor, layer: int, cache: StepCache, spec: AttentionSpec) -> Tensor | None:
    """The requests of several rows, all at once and straight from the pages, by Triton; None where it cannot."""
    pools, count = cache.pools(layer), cache.num_single
    if (
        not len(query)
        or query.is_cpu
        or pools is None
        or spec.value_dim is not None
        or query.shape[-1] > _MOST_FEATURES
    ):
        return None
    if why_no_pages(cache.cache) is not None:
        return None
    tables = cache.page_table[count:], cache.prompt_starts, cache.lengths[count:]
    more = {"window": spec.window, "softcap": spec.softcap, "stored_scales": cache.scales(layer)}
    return _triton().prefill(query, *pools, *tables, spec.scale, **more)


def why_no_pages(cache: KVCache) -> str | None:
    """Why attention cannot read the pages of ``cache`` on its GPU, as the end of a sentence; None where it can."""
    if cache.pools(0) is None:
        return "part of the keys is stored in another type than the rest"
    if not (cache.kv_format.is_plain or cache.kv_format.is_fp8):
        return f"keys and values are stored in {cache.kv_format.stored} and computed in {cache.kv_format.computed}"
    return triton.why_not(cache.device)


@functools.cache
def _triton() -> _Kernels:
    from tapscope.kernels.triton import paged_decode, paged_prefill  # need Triton

    return _Kernels(paged_decode.paged_decode, paged_prefill.paged_prefill)


def _attend_batch(query: Tensor, layer: int, cache: StepCache, spec: AttentionSpec) -> Tensor:
    """The requests that have one row, at once: [requests, heads, d] -> [requests, heads, value dim].

    They are padded to the longest; the heads of a group are folded into the row axis.
    """
    keys, values = cache.read_batch(layer, spec.window)
    if spec.value_dim is not None:
        values = keys[..., : spec.value_dim]
    k, v = keys.transpose(1, 2), values.transpose(1, 2)
    folded = query.reshape(len(query), k.shape[1], -1, query.shape[-1])
    bias = cache.batch_bias(spec.window, query.dtype)
    return _attend_folded(folded, k, v, bias, spec).reshape(*query.shape[:2], -1)


def attend_one(
    query: Tensor, keys: Tensor, values: Tensor, diagonal: int, spec: AttentionSpec, masks: StepMasks | None = None
) -> Tensor:
    """One request: [count, heads, d] against [length, kv_heads, d] twice -> [count, heads, value dim].

    Row i stands at key ``diagonal + i``. The heads of a group are folded into the row axis: on a CPU that is several
    times faster than `enable_gqa`. Many rows go by pieces, each against the keys that its last row sees.
    """
    if has_torch_function((query,)):
        return handle_torch_function(attend_one, (query,), query, keys, values, diagonal, spec, masks)
    count, num_heads, dim = query.shape
    kv_heads = keys.shape[1]
    group = num_heads // kv_heads
    k, v = keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
    sees_all = spec.window is None or spec.window >= diagonal + count
    if count > 1 and not query.is_cpu and diagonal == 0 and spec.softcap is None and sees_all:
        q = query.transpose(0, 1).unsqueeze(0)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale, enable_gqa=group > 1)
        return out[0].transpose(0, 1)
    folded = query.view(count, kv_heads, group, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
    if count == 1 and diagonal == len(keys) - 1:  # a decoding row; its window was cut out when the cache was read
        out = _attend_folded(folded, k, v, None, spec)
    else:
        out = _attend_pieces(folded, k, v, diagonal, group, spec, masks or StepMasks())
    return out.view(kv_heads, count, group, -1).transpose(0, 1).reshape(count, num_heads, -1)


def _attend_pieces(
    query: Tensor, keys: Tensor, values: Tensor, diagonal: int, group: int, spec: AttentionSpec, masks: StepMasks
) -> Tensor:
    """[1, kv_heads, count * group, d] -> [kv_heads, count * group, value dim], some rows at a time.

    So scores past the diagonal are hardly computed, stay in a CPU's caches, and no mask is larger than MOST_ELEMENTS
    unless one row is. All pieces share one mask, whose last columns are those of a piece's last keys.
    """
    kv_heads, count = keys.shape[1], query.shape[2] // group
    seen = min(diagonal + count, spec.window or diagonal + count)
    rows = min(count, _piece_rows(group, kv_heads, torch.get_num_threads()))
    if not query.is_cpu:
        rows = min(count, max(1, MOST_ELEMENTS // (group * (seen + count))))
    width = seen + rows - 1
    dtype = query.dtype if query.is_cpu else torch.bool  # what is added has to be aligned for kernels of a GPU

    def made() -> Tensor:
        return _piece_mask(rows, width, spec.window, dtype, query.device).repeat_interleave(group, 0)

    mask = masks.get((rows, width, spec.window, dtype, group), made)
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
    """Rows of a piece: of 192 and more folded ones SDPA takes 64 at a time, and every thread is to have some."""
    return max(32, -(-max(192, 64 * threads // kv_heads) // group))


def _piece_mask(rows: int, width: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, width]: what a row sees, where the last row stands at the last key.

    In bool, or what scores are raised by: -inf at what it does not see, 0 elsewhere.
    """
    hidden = torch.ones(rows, width, dtype=torch.bool, device=device).triu_(width - rows + 1)
    if window is not None:
        hidden |= torch.ones(rows, width, dtype=torch.bool, device=device).tril_(width - rows - window)
    if dtype == torch.bool:
        return hidden.logical_not_()
    return torch.zeros(rows, width, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def _attend_folded(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """``mask``: bool, what is seen, or what scores are raised by."""
    if spec.softcap is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=spec.scale)
    return _softcapped(query, keys, values, mask, spec.scale, spec.softcap)


def _softcapped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, cap: float) -> Tensor:
    """Attention written out, rounded where transformers' `eager_attention_forward` of Gemma 2 rounds."""
    scores = (query @ keys.mT * scale / cap).tanh() * cap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ values
