"""QK norm, rotary embedding and KV-cache write, fused in one kernel between a layer's projections and its attention.

    query, key = norm(query), norm(key)              per head (Qwen3, Gemma 3), as in kernels/triton/norm.py
    query, key = rotate(query), rotate(key)          arXiv:2104.09864
    pool[slot of the token] = key, value             in the KV cache's dtype

cos and sin [tokens, rotary dim] belong to the tokens of the step; columns i and i + rotary dim / 2 are equal. Features
outside of ``offset`` .. ``offset`` + rotary dim are copied (partial rotary embedding; MLA rotates the last features).
The styles pair features as follows:

    ``neox``                  i with i + half, in place; products rounded to the dtype: transformers' Llama
    ``interleaved``           2i with 2i + 1, in place; float32 until the final rounding: transformers' DeepseekV2
    ``interleaved_to_neox``   2i with 2i + 1, written to i and i + half; products rounded: transformers' DeepseekV3

:func:`angles` computes cos and sin from the positions of a step.
A value x is stored as x / scale in FP8, clamped to the dtype's range (:mod:`tapscope.engine.kv_cache.kv_format`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.launch import Launcher, check_same_device, check_stored, next_power, wait_for_previous
from tapscope.kernels.triton.norm import rms_norm_reference

STYLES = ("neox", "interleaved", "interleaved_to_neox")
_TILE = 1024
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class HeadNorm(NamedTuple):
    """RMSNorm parameters for each head of queries and keys (QK norm)."""

    query_weight: Tensor
    """[dim], in the dtype of the queries."""
    key_weight: Tensor
    """[dim], in the same dtype."""
    eps: float
    is_gemma: bool = False


class CachePool(NamedTuple):
    """KV-cache pools of one layer."""

    keys: Tensor
    """[pages, page_size, kv_heads, dim]."""
    values: Tensor | None
    """[pages, page_size, kv_heads, value dim]; None if values are computed from the cached keys (MLA)."""
    scales: tuple[float, float] = (1.0, 1.0)
    """Dequantization scales of stored FP8 keys and values."""


def rotate_reference(states: Tensor, cos: Tensor, sin: Tensor, style: str = "neox", offset: int = 0) -> Tensor:
    """Return ``states`` [tokens, heads, dim] with the features from ``offset`` on rotated, in plain PyTorch."""
    end = offset + cos.shape[1]
    rotated, half = states[..., offset:end], cos.shape[1] // 2
    cos, sin = cos[:, None, :half], sin[:, None, :half]
    if style == "neox":
        first, second = rotated[..., :half], rotated[..., half:]
    else:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    if style == "interleaved":
        first, second = first.float(), second.float()
        pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        pairs = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((states[..., :offset], pairs.to(states.dtype), states[..., end:]), dim=-1)


def rotate_and_store_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    rotation: tuple[Tensor, Tensor],
    slots: Tensor,
    pool: CachePool,
    *,
    norm: HeadNorm | None = None,
    style: str = "neox",
    offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Compute and store like :func:`rotate_and_store`, in plain PyTorch; copies ``slots`` to the host."""
    if norm is not None:
        query = rms_norm_reference(query, norm.query_weight, norm.eps, is_gemma=norm.is_gemma)
        key = rms_norm_reference(key, norm.key_weight, norm.eps, is_gemma=norm.is_gemma)
    query, key = (rotate_reference(states, *rotation, style, offset) for states in (query, key))
    for cache, states, scale in ((pool.keys, key, pool.scales[0]), (pool.values, value, pool.scales[1])):
        if cache is not None and states is not None:
            if cache.dtype != states.dtype:
                max_value = torch.finfo(cache.dtype).max
                states = (states.float() / scale if cache.dtype in _FP8 else states).clamp(-max_value, max_value)
            for slot, row in zip(slots.tolist(), states.to(cache.dtype), strict=True):
                cache[slot // cache.shape[1], slot % cache.shape[1]] = row
    return query, key


def rotate_and_store(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    rotation: tuple[Tensor, Tensor],
    slots: Tensor,
    pool: CachePool,
    *,
    norm: HeadNorm | None = None,
    style: str = "neox",
    offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Rotate ``query`` and ``key``, after an optional QK norm, and write key and value to the KV cache.

    ``query`` [tokens, heads, dim], ``key`` [tokens, kv_heads, dim] and ``value`` [tokens, kv_heads, value dim] may be
    views with a contiguous last axis. Returns the rotated query and key as new contiguous tensors of the query's dtype.
    Keys and values are stored in ``pool`` at ``slots`` [tokens] int64: page * page_size + offset. ``rotation`` is (cos,
    sin). Raises UsageError for inconsistent tensors.
    """
    cos, sin = rotation
    _check(query, key, value, cos, sin, slots, pool, norm)
    if style not in STYLES:
        raise UsageError(f"style {style!r}: expected one of {', '.join(STYLES)}")
    (tokens, heads, dim), kv_heads, rotary = query.shape, key.shape[1], cos.shape[1]
    if rotary % 2 or offset not in (0, dim - rotary):
        raise UsageError(
            f"{rotary} rotated features from {offset} on: expected an even number, the first or the last of {dim}"
        )
    rotated = torch.empty_like(query, memory_format=torch.contiguous_format)
    cached = torch.empty_like(key, memory_format=torch.contiguous_format)
    if not tokens:
        return rotated, cached
    values = cached if value is None else value
    value_pool = pool.keys if pool.values is None else pool.values
    block = max(1, _TILE // next_power(dim))
    query_blocks, key_blocks = -(-heads // block), -(-kv_heads // block)
    weights = (None, None) if norm is None else norm[:2]
    args = (
        query, key, values, cos, sin, slots, *weights, pool.keys, value_pool, rotated, cached,
        *query.stride()[:2], *key.stride()[:2], *values.stride()[:2], cos.stride(0), sin.stride(0),
        *pool.keys.stride()[1:3], *value_pool.stride()[1:3], 0.0 if norm is None else norm.eps, *pool.scales,
    )  # fmt: skip
    constants = {
        "HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "WIDTH": values.shape[2], "ROTARY": rotary,
        "OFFSET": offset, "STYLE": STYLES.index(style), "IS_GEMMA": norm is not None and norm.is_gemma,
        "BLOCK_H": block, "HALF": next_power(rotary // 2), "REST": next_power(dim - rotary) if dim > rotary else 0,
        "BLOCK_V": next_power(values.shape[2]), "QUERY_BLOCKS": query_blocks, "KEY_BLOCKS": key_blocks,
        "MOST": torch.finfo(pool.keys.dtype).max, "IS_PLAIN": pool.keys.dtype == key.dtype,
        "IS_FP8": pool.keys.dtype in _FP8,
    }  # fmt: skip
    grid = tokens, query_blocks + key_blocks * (1 if value is None else 2), 1
    _launch_rope(query.device, grid, args, constants, num_warps=4, enable_fp_fusion=False)
    return rotated, cached


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    pool: CachePool,
    norm: HeadNorm | None,
) -> None:
    """Raise UsageError for inconsistent shapes, dtypes, strides or devices."""
    weights = () if norm is None else norm[:2]
    check_same_device(query, key, value, cos, sin, slots, pool.keys, pool.values, *weights)
    check_stored(pool.keys.dtype, pool.keys.device)
    if len({query.dtype, key.dtype, *(() if value is None else (value.dtype,))}) > 1:
        raise UsageError("query, key and value must have one dtype")
    tokens, dim = len(query), query.shape[2]
    if key.shape != (tokens, pool.keys.shape[2], dim) or pool.keys.shape[3] != dim or slots.shape != (tokens,):
        shapes = f"query {list(query.shape)}, key {list(key.shape)}, slots {list(slots.shape)}"
        raise UsageError(f"{shapes} do not fit the pool of keys {list(pool.keys.shape)}")
    if (value is None) != (pool.values is None):
        raise UsageError("values and their pool must be given together")
    if value is not None and pool.values is not None and value.shape[1:] != pool.values.shape[2:]:
        raise UsageError(f"value {list(value.shape)} does not fit the pool {list(pool.values.shape)}")
    if slots.dtype != torch.int64 or cos.shape != sin.shape or len(cos) != tokens:
        raise UsageError(f"slots are {slots.dtype} (expected int64), cos {list(cos.shape)} and sin {list(sin.shape)}")
    for weight in weights:
        if weight.shape != (dim,) or weight.dtype != query.dtype or not weight.is_contiguous():
            raise UsageError(f"a norm's weight is {weight.dtype} {list(weight.shape)}; expected {query.dtype} [{dim}]")
    for kept in (pool.keys, pool.values):
        if kept is not None and (kept.stride(0) != kept.shape[1] * kept.stride(1) or kept.dtype != pool.keys.dtype):
            raise UsageError("a pool's pages must be adjacent, those of keys and values in one dtype")
    if any(t is not None and t.stride(-1) != 1 for t in (query, key, value, cos, sin, pool.keys, pool.values)):
        raise UsageError("the last axis of every tensor must be contiguous")


def angles_reference(positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute :func:`angles` in plain PyTorch."""
    angle = positions.float()[:, None] * inv_freq
    angle = torch.cat((angle, angle), dim=-1)
    return (angle.cos() * scaling).to(dtype), (angle.sin() * scaling).to(dtype)


def angles(positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin [tokens, dim], multiplied by ``scaling``, for ``positions`` [tokens] int64.

    ``inv_freq`` is [dim / 2] float32. The results are computed in float32 and rounded to ``dtype``. Raises UsageError
    for other dtypes and shapes.
    """
    check_same_device(positions, inv_freq)
    if positions.ndim != 1 or positions.dtype != torch.int64 or inv_freq.ndim != 1 or inv_freq.dtype != torch.float32:
        raise UsageError(
            f"positions {positions.dtype} {list(positions.shape)} and frequencies {inv_freq.dtype} "
            f"{list(inv_freq.shape)}: expected int64 [tokens] and float32 [dim / 2]"
        )
    tokens, half = len(positions), len(inv_freq)
    cos, sin = (torch.empty(tokens, 2 * half, dtype=dtype, device=positions.device) for _ in range(2))
    if tokens and half:
        args = positions, inv_freq, cos, sin, scaling, positions.stride(0), inv_freq.stride(0)
        sizes = {"HALF": half, "BLOCK": next_power(half)}
        _launch_angles(positions.device, (tokens, 1, 1), args, sizes, num_warps=2)
    return cos, sin


@triton.jit
def _encoded(x, scale, dtype: tl.constexpr, MOST: tl.constexpr, IS_PLAIN: tl.constexpr, IS_FP8: tl.constexpr):
    """Convert float32 values to the cache's dtype, scaled and saturated; NaN stays NaN."""
    if IS_FP8:
        x = tl.div_rn(x, scale)
    if not IS_PLAIN:
        x = tl.where(x > MOST, MOST, tl.where(x < -MOST, -MOST, x))
    return x.to(dtype)


@triton.jit
def _pair(j, ROTARY: tl.constexpr, OFFSET: tl.constexpr, IS_APART: tl.constexpr):
    """Return the two feature indices of pair ``j``: ROTARY / 2 apart if IS_APART, else adjacent."""
    if IS_APART:
        return OFFSET + j, OFFSET + ROTARY // 2 + j
    else:
        return OFFSET + 2 * j, OFFSET + 2 * j + 1


@triton.jit
def _rotated_pairs(first, second, cos, sin, dtype: tl.constexpr, STYLE: tl.constexpr):
    """Rotate pairs of float32 features; products are rounded to ``dtype`` unless the style is `interleaved`."""
    a, b, c, d = first * cos, second * sin, second * cos, first * sin
    if STYLE != 1:
        a, b, c, d = a.to(dtype), b.to(dtype), c.to(dtype), d.to(dtype)
    return (a.to(tl.float32) - b.to(tl.float32)).to(dtype), (c.to(tl.float32) + d.to(tl.float32)).to(dtype)


@triton.jit
def _rotate_heads(
    states, weight, rotated, cache, cos, sin, head, step, cache_step, heads, eps, scale,
    DIM: tl.constexpr, ROTARY: tl.constexpr, OFFSET: tl.constexpr, STYLE: tl.constexpr, IS_GEMMA: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, MOST: tl.constexpr, IS_PLAIN: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """Norm and rotate heads of one token into ``rotated`` [heads, DIM], and write them to ``cache`` if given."""
    dtype: tl.constexpr = states.dtype.element_ty
    j, i, valid = tl.arange(0, HALF), tl.arange(0, REST if REST else 1), head < heads
    pair_mask, rest_mask = valid & (j < ROTARY // 2), valid & (i < DIM - ROTARY)
    one, two = _pair(j, ROTARY, OFFSET, STYLE == 0)
    rest = tl.where(i < OFFSET, i, i + ROTARY)
    first = tl.load(states + head * step + one, mask=pair_mask, other=0.0).to(tl.float32)
    second = tl.load(states + head * step + two, mask=pair_mask, other=0.0).to(tl.float32)
    other = tl.load(states + head * step + rest, mask=rest_mask, other=0.0).to(tl.float32)
    if weight is not None:
        squares = tl.sum(first * first + second * second, 1) + tl.sum(other * other, 1)
        inv_rms = tl.rsqrt(squares / DIM + eps)[:, None]
        first = _weighted(first * inv_rms, weight + one, j < ROTARY // 2, dtype, IS_GEMMA)
        second = _weighted(second * inv_rms, weight + two, j < ROTARY // 2, dtype, IS_GEMMA)
        other = _weighted(other * inv_rms, weight + rest, i < DIM - ROTARY, dtype, IS_GEMMA)
    cosine = tl.load(cos + j, mask=j < ROTARY // 2, other=0.0).to(tl.float32)
    sine = tl.load(sin + j, mask=j < ROTARY // 2, other=0.0).to(tl.float32)
    first, second = _rotated_pairs(first, second, cosine, sine, dtype, STYLE)
    one, two = _pair(j, ROTARY, OFFSET, STYLE != 1)
    tl.store(rotated + head * DIM + one, first, mask=pair_mask)
    tl.store(rotated + head * DIM + two, second, mask=pair_mask)
    tl.store(rotated + head * DIM + rest, other.to(dtype), mask=rest_mask)
    if cache is not None:
        stored: tl.constexpr = cache.dtype.element_ty
        cache += head * cache_step
        tl.store(cache + one, _encoded(first.to(tl.float32), scale, stored, MOST, IS_PLAIN, IS_FP8), mask=pair_mask)
        tl.store(cache + two, _encoded(second.to(tl.float32), scale, stored, MOST, IS_PLAIN, IS_FP8), mask=pair_mask)
        tl.store(cache + rest, _encoded(other, scale, stored, MOST, IS_PLAIN, IS_FP8), mask=rest_mask)


@triton.jit
def _weighted(x, weight, valid, dtype: tl.constexpr, IS_GEMMA: tl.constexpr):
    """Multiply normalized float32 values by a norm's weight, with the rounding of the norm."""
    scale = tl.load(weight, mask=valid, other=0.0).to(tl.float32)
    if IS_GEMMA:
        x *= 1.0 + scale
    else:
        x = x.to(dtype).to(tl.float32) * scale
    return x.to(dtype).to(tl.float32)


@triton.jit
def _rope_kernel(
    query, key, value, cos, sin, slots, query_weight, key_weight, key_pool, value_pool, rotated, cached,
    query_row, query_head, key_row, key_head, value_row, value_head, cos_row, sin_row,
    key_slot, key_pool_head, value_slot, value_pool_head, eps, key_scale, value_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr,
    OFFSET: tl.constexpr, STYLE: tl.constexpr, IS_GEMMA: tl.constexpr, BLOCK_H: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, BLOCK_V: tl.constexpr, QUERY_BLOCKS: tl.constexpr, KEY_BLOCKS: tl.constexpr,
    MOST: tl.constexpr, IS_PLAIN: tl.constexpr, IS_FP8: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Process BLOCK_H heads of one token: of its query, its key or its value."""
    wait_for_previous(IS_OVERLAPPED)
    row, part, head = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK_H)[:, None]
    cos += row * cos_row
    sin += row * sin_row
    if part < QUERY_BLOCKS:
        _rotate_heads(
            query + row * query_row, query_weight, rotated + row * HEADS * DIM, None, cos, sin, part * BLOCK_H + head,
            query_head, 0, HEADS, eps, key_scale,
            DIM, ROTARY, OFFSET, STYLE, IS_GEMMA, HALF, REST, MOST, IS_PLAIN, IS_FP8,
        )  # fmt: skip
    elif part < QUERY_BLOCKS + KEY_BLOCKS:
        cache = key_pool + tl.load(slots + row) * key_slot
        _rotate_heads(
            key + row * key_row, key_weight, cached + row * KV_HEADS * DIM, cache, cos, sin,
            (part - QUERY_BLOCKS) * BLOCK_H + head, key_head, key_pool_head, KV_HEADS, eps, key_scale,
            DIM, ROTARY, OFFSET, STYLE, IS_GEMMA, HALF, REST, MOST, IS_PLAIN, IS_FP8,
        )  # fmt: skip
    else:
        head += (part - QUERY_BLOCKS - KEY_BLOCKS) * BLOCK_H
        e = tl.arange(0, BLOCK_V)
        valid = (head < KV_HEADS) & (e < WIDTH)
        x = tl.load(value + row * value_row + head * value_head + e, mask=valid, other=0.0).to(tl.float32)
        ptrs = value_pool + tl.load(slots + row) * value_slot + head * value_pool_head + e
        stored: tl.constexpr = value_pool.dtype.element_ty
        tl.store(ptrs, _encoded(x, value_scale, stored, MOST, IS_PLAIN, IS_FP8), mask=valid)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _angles_kernel(
    positions, inv_freq, cos, sin, scaling, position_step, freq_step, HALF: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute cos and sin of one token."""
    row, j = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    position = tl.load(positions + row * position_step).to(tl.float32)
    angle = position * tl.load(inv_freq + j * freq_step, mask=j < HALF, other=0.0)
    for part in tl.static_range(2):
        at = row * 2 * HALF + part * HALF + j
        tl.store(cos + at, (tl.cos(angle) * scaling).to(cos.dtype.element_ty), mask=j < HALF)
        tl.store(sin + at, (tl.sin(angle) * scaling).to(sin.dtype.element_ty), mask=j < HALF)


_launch_rope, _launch_angles = Launcher(_rope_kernel, overlaps=True), Launcher(_angles_kernel)
