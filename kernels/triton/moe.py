"""Mixture of experts: pairs of token and expert brought into the experts' order, and a token's results added up.

    order = pairs sorted by expert, then by their number; foreign pairs (of other ranks' experts) last
    ends[e] = pairs of experts 0 .. e                              the runs that a grouped matrix product takes
    output[t] = sum over j of weight[t, j] * down[place of pair (t, j)]

Sorting is a count: each expert's program counts the pairs before its own and puts its own behind them, so that one
launch does it and nothing is read on the host. Sums go over a token's pairs in their order, in float32; products are
rounded to the type that torch would give them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.core.errors import UsageError
from tapscope.kernels.triton.launch import Launcher, check_same_device, next_power

_BLOCK = 1024


def route_reference(experts: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """What :func:`route` computes, by torch's sort."""
    local = experts - first
    local = local.masked_fill((local < 0) | (local >= count), count)
    ordered, order = torch.sort(local, stable=True)
    ends = torch.searchsorted(ordered, torch.arange(count, device=experts.device), right=True, out_int32=True)
    return order, torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device)), ends


def route(experts: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Experts [pairs] int64 -> (order [pairs] int64, each pair's place in it [pairs] int64, ends [count] int32).

    The experts ``first`` .. ``first`` + ``count`` - 1 are this rank's. Raises UsageError for another type or shape.
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
    """What :func:`combine` computes."""
    pairs = down[places].view(*weights.shape, down.shape[1])
    return (pairs * weights.unsqueeze(-1)).sum(dim=1).to(down.dtype)


def combine(down: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """[pairs, hidden] in the experts' order, places [pairs] int64, weights [tokens, k] -> [tokens, hidden].

    In the dtype of ``down``; weights have that or float32. Raises UsageError for tensors that do not fit together.
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
def _experts(experts, at, pairs, first, count):
    """This rank's numbers of the experts of pairs: ``count`` for foreign ones, more where there is no pair."""
    local = tl.load(experts + at, mask=at < pairs, other=0) - first
    local = tl.where((local < 0) | (local >= count), count, local)
    return tl.where(at < pairs, local, count + 1)


@triton.jit(do_not_specialize=["pairs", "first"])
def _route_kernel(experts, order, places, ends, pairs, first, BLOCK: tl.constexpr):
    """The pairs of one expert, or the foreign ones."""
    expert, count = tl.program_id(0), tl.num_programs(0) - 1
    fewer = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        fewer += (_experts(experts, at, pairs, first, count) < expert).to(tl.int32)
    end = tl.sum(fewer, 0)
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mine = _experts(experts, at, pairs, first, count) == expert
        place = end + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order + place, at.to(tl.int64), mask=mine)
        tl.store(places + at, place.to(tl.int64), mask=mine)
        end += tl.sum(mine.to(tl.int32), 0)
    if expert < count:
        tl.store(ends + expert, end)


@triton.jit
def _combine_kernel(down, places, weights, output, hidden, K: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK features of one token."""
    token, feature = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(K):
        place = tl.load(places + token * K + j)
        by = tl.load(weights + token * K + j).to(tl.float32)
        x = tl.load(down + place * hidden + feature, mask=feature < hidden, other=0.0).to(tl.float32)
        total += (x * by).to(weights.dtype.element_ty).to(tl.float32)
    tl.store(output + token * hidden + feature, total.to(output.dtype.element_ty), mask=feature < hidden)


_launch_route, _launch_combine = Launcher(_route_kernel), Launcher(_combine_kernel)
