"""Minimal ring attention for Megatron-core's context parallelism on CPU; Megatron's own needs Transformer Engine.

Sequences are sharded in zigzag order: of the 2 * cp chunks of a sequence, rank r holds chunks r and 2 * cp - 1 - r.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def zigzag(bounds: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return the indices of the packed tokens that ``rank`` holds; ``bounds`` is ``cu_seqlens`` of whole sequences."""
    parts = []
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        chunks = torch.arange(first, last).chunk(2 * size)
        parts += [chunks[rank], chunks[2 * size - 1 - rank]]
    return torch.cat(parts)


class _Shift(torch.autograd.Function):
    """Send a tensor to the next rank of the ring and receive one from the previous rank; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _exchange(tensor, group, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchange(grad, ctx.group, -1), None


def _exchange(tensor: torch.Tensor, group: Any, offset: int) -> torch.Tensor:
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    send = dist.P2POp(dist.isend, tensor.contiguous(), ranks[(rank + offset) % len(ranks)], group)
    receive = dist.P2POp(dist.irecv, received, ranks[(rank - offset) % len(ranks)], group)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return received


class RingAttention(nn.Module):
    """Causal attention over packed sequences; keys and values circulate among the ranks of the ring."""

    def __init__(self, config: Any, **_: object) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5
        self.skew = 0
        """Offset of the causal mask; a nonzero value is a seeded bug."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: Any,
        **_: object,
    ) -> torch.Tensor:
        """Attend from this rank's queries to the tokens of all ranks.

        ``query`` is [t, heads, d], ``key`` and ``value`` are [t, groups, d], with t tokens of this rank; returns
        [t, heads * d].
        """
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        bounds = packed_seq_params.cu_seqlens_q
        indices = [zigzag(bounds, each, size) for each in range(size)]
        sequence_of = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff())
        repeats, q = query.shape[1] // key.shape[1], query.float().transpose(0, 1)
        keys_values = torch.stack([key, value])
        row_max = torch.full((*q.shape[:2], 1), float("-inf"))
        denominator, numerator = torch.zeros_like(row_max), torch.zeros_like(q)
        for step in range(size):
            own, other = indices[rank][:, None], indices[(rank - step) % size][None]
            k, v = keys_values.float().repeat_interleave(repeats, 2).transpose(1, 2)
            scores = q @ k.transpose(1, 2) * self.scale
            is_masked = (sequence_of[own] != sequence_of[other]) | (other > own + self.skew)
            scores = scores.masked_fill(is_masked, float("-inf"))
            new_max = torch.maximum(row_max, scores.detach().amax(-1, keepdim=True))
            shift = new_max.masked_fill(new_max.isinf(), 0)
            weights, rescale = (scores - shift).exp(), (row_max - shift).exp()
            denominator = denominator * rescale + weights.sum(-1, keepdim=True)
            numerator = numerator * rescale + weights @ v
            row_max = new_max
            if step + 1 < size:
                keys_values = _Shift.apply(keys_values, group)
        return (numerator / denominator).transpose(0, 1).flatten(1).to(query.dtype)
