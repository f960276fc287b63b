"""Mixture of experts: sort of (token, expert) pairs by expert, and weighted sum of each token's expert outputs.

    order = pair indices sorted by expert, stable; pairs of other ranks' experts last
    ends[e] = number of pairs of experts 0 .. e                    row ranges for a grouped matrix product
    output[t] = sum over j of weight[t, j] * down[place of pair (t, j)]

The sort is a counting sort: each expert's program counts the pairs of lower experts and places its own pairs after
them. It takes one launch and no host synchronization. Sums accumulate over a token's pairs in order, in float32;
products are rounded to the dtype that PyTorch would give them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.launch import Launcher, check_same_device, next_power

_BLOCK = 1024


def route_reference(experts: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`route` with ``torch.sort``."""
    local = experts - first
    local = local.masked_fill((local < 0) | (local >= count), count)
    ordered, order = torch.sort(local, stable=True)
    ends = torch.searchsorted(ordered, torch.arange(count, device=experts.device), right=True, out_int32=True)
    return order, torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device)), ends


def route(experts: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the pairs of ``experts`` [pairs] int64 by expert.

    Returns (order [pairs] int64, each pair's index in ``order`` [pairs] int64, ends [count] int32). The experts
    ``first`` .. ``first`` + ``count`` - 1 belong to this rank. Raises UsageError for another dtype or shape.
    """
    check_same_device(experts)
    if experts.ndim != 1 or experts.dtype != torch.int64 or not experts.is_contiguous() or count < 0:
        raise UsageError(f"experts are {experts.dtype} {list(experts.shape)}; expected contiguous int64 [pairs]")
    order, places = torch.empty_like(experts), torch.empty_like(experts)
    ends = torch.zeros(count, dtype=torch.int32, device=experts.device)
    if len(experts):
        args = experts, order, places, ends, len(experts), first
        _launch_route(experts.device, (count + 1, 1, 1), args, {"BLOCK": _BLOCK}, num_warps=4)
    return order, places, ends


def combine_reference(down: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Compute :func:`combine` in plain PyTorch."""
    pairs = down[places].view(*weights.shape, down.shape[1])
    return (pairs * weights.unsqueeze(-1)).sum(dim=1).to(down.dtype)


def combine(down: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's expert outputs, [tokens, hidden] in the dtype of ``down``.

    ``down`` [pairs, hidden] is in expert order, ``places`` [pairs] int64 holds the row of each pair. ``weights``
    [tokens, k] have the dtype of ``down`` or float32. Raises UsageError for inconsistent tensors.
    """
    check_same_device(down, places, weights)
    tokens, k = weights.shape
    if down.ndim != 2 or places.shape != (tokens * k,) or len(down) != tokens * k:
        raise UsageError(f"down {list(down.shape)}, places {list(places.shape)}, weights {list(weights.shape)}")
    if weights.dtype not in (down.dtype, torch.float32) or places.dtype != torch.int64:
        raise UsageError(f"weights are {weights.dtype} and places {places.dtype}; expected {down.dtype} and int64")
    if not all(tensor.is_contiguous() for tensor in (down, places, weights)):
        raise UsageError("down, places and weights must be contiguous")
    output = down.new_empty(tokens, down.shape[1])
    if output.numel():
        block = min(_BLOCK, next_power(down.shape[1]))
        grid = tokens, -(-down.shape[1] // block), 1
        args = down, places, weights, output, down.shape[1]
        _launch_combine(down.device, grid, args, {"K": k, "BLOCK": block}, num_warps=4, enable_fp_fusion=False)
    return output


@triton.jit
def _local_experts(experts, index, pairs, first, count):
    """Load rank-local expert indices of pairs: ``count`` for other ranks' experts, ``count + 1`` past the last pair."""
    local = tl.load(experts + index, mask=index < pairs, other=0) - first
    local = tl.where((local < 0) | (local >= count), count, local)
    return tl.where(index < pairs, local, count + 1)


@triton.jit(do_not_specialize=["pairs", "first"])
def _route_kernel(experts, order, places, ends, pairs, first, BLOCK: tl.constexpr):
    """Place the pairs of one expert, or in the last program those of other ranks' experts."""
    expert, count = tl.program_id(0), tl.num_programs(0) - 1
    lower = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        index = start + tl.arange(0, BLOCK)
        lower += (_local_experts(experts, index, pairs, first, count) < expert).to(tl.int32)
    end = tl.sum(lower, 0)
    for start in range(0, pairs, BLOCK):
        index = start + tl.arange(0, BLOCK)
        mine = _local_experts(experts, index, pairs, first, count) == expert
        place = end + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order + place, index.to(tl.int64), mask=mine)
        tl.store(places + index, place.to(tl.int64), mask=mine)
        end += tl.sum(mine.to(tl.int32), 0)
    if expert < count:
        tl.store(ends + expert, end)


@triton.jit
def _combine_kernel(down, places, weights, output, hidden, K: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK features of one token."""
    token, feature = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(K):
        place = tl.load(places + token * K + j)
        weight = tl.load(weights + token * K + j).to(tl.float32)
        x = tl.load(down + place * hidden + feature, mask=feature < hidden, other=0.0).to(tl.float32)
        total += (x * weight).to(weights.dtype.element_ty).to(tl.float32)
    tl.store(output + token * hidden + feature, total.to(output.dtype.element_ty), mask=feature < hidden)


_launch_route, _launch_combine = Launcher(_route_kernel), Launcher(_combine_kernel)
