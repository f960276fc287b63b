"""One training step of a Megatron-core model on CPU: unsplit, over pipeline stages, or on a context-parallel shard.

It replaces Megatron's own schedules, which need CUDA. Used by megatron_team.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron_ring import zigzag
from megatron_team import batch, loss
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Inputs of this rank for one training step."""

    ids: torch.Tensor
    """[b, s]; packed [1, t] under context parallelism."""
    positions: torch.Tensor
    labels: Mapping[str, Sequence[int]] | torch.Tensor
    """The prompts, or the next token id of every packed token (-100: no label)."""
    num_labels: int
    """Number of labels in the whole job."""
    mask: torch.Tensor | None = None
    """[1, 1, s, s]; True is masked."""
    packed: PackedSeqParams | None = None
    step: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``dumper.step``."""


def inputs_of_this_rank(prompts: Mapping[str, Sequence[int]], *, is_sequence_parallel: bool = False) -> Inputs:
    """Build this rank's inputs from ``prompts``: one right-padded batch, or packed tokens under context parallelism.

    With expert parallelism every rank has its own prompts; with context parallelism, its own two chunks of every
    prompt. Raises ValueError if ``prompts`` cannot be divided among the ranks.
    """
    num_labels = sum(len(tokens) - 1 for tokens in prompts.values())
    if parallel_state.get_context_parallel_world_size() > 1:
        return _packed(prompts, num_labels)
    ep, rank = parallel_state.get_expert_model_parallel_world_size(), parallel_state.get_expert_model_parallel_rank()
    if len(prompts) < ep:
        raise ValueError(f"{len(prompts)} prompts for {ep} expert-parallel ranks: each rank needs one")
    longest, own_prompts = max(map(len, prompts.values())), dict(list(prompts.items())[rank::ep])
    tp = parallel_state.get_tensor_model_parallel_world_size()
    ids, step = batch(own_prompts, multiple_of=tp if is_sequence_parallel else 1, at_least=longest)
    length = ids.shape[1]
    return Inputs(
        ids=ids,
        positions=torch.arange(length).expand_as(ids),
        labels=own_prompts,
        num_labels=num_labels,
        mask=torch.ones(length, length, dtype=torch.bool).triu(1)[None, None],
        step=step,
    )


def _packed(prompts: Mapping[str, Sequence[int]], num_labels: int) -> Inputs:
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    lengths = [len(tokens) for tokens in prompts.values()]
    if any(length % (2 * size) for length in lengths):
        raise ValueError(f"prompts of {lengths} tokens: each must be a multiple of {2 * size} for {size} ranks")
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    indices = zigzag(bounds, rank, size)
    ids = torch.tensor([token for tokens in prompts.values() for token in tokens])
    next_ids = torch.tensor([token for tokens in prompts.values() for token in [*list(tokens)[1:], -100]])
    longest = max(lengths)
    return Inputs(
        ids=ids[indices][None],
        positions=torch.cat([torch.arange(length) for length in lengths])[indices][None],
        labels=next_ids[indices],
        num_labels=num_labels,
        packed=PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
        ),
        step={"phase": "train"},
    )


def train_step(model: nn.Module, inputs: Inputs, dtype: torch.dtype, *, is_backward: bool) -> float | None:
    """Run forward and, if ``is_backward``, backward of the mean cross-entropy.

    Returns this rank's share of the loss, or None before the last pipeline stage.
    """
    is_first, is_last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    received = None
    if not is_first:
        shape = (inputs.ids.shape[1], inputs.ids.shape[0], model.config.hidden_size)
        received = _receive(shape, dtype, parallel_state.get_pipeline_model_parallel_prev_rank())
        received.requires_grad_(is_backward)
        model.module.set_input_tensor(received)
    optional = {} if inputs.packed is None else {"packed_seq_params": inputs.packed}
    output = model(inputs.ids, inputs.positions, inputs.mask, **optional)
    value = _loss(output, inputs) if is_last else None
    if not is_last:
        after = parallel_state.get_pipeline_model_parallel_next_rank()
        dist.send(output.detach().contiguous(), after)
        if is_backward:
            output.backward(_receive(output.shape, dtype, after))
    elif is_backward:
        value.backward()
    if received is not None and is_backward:
        dist.send(received.grad.contiguous(), parallel_state.get_pipeline_model_parallel_prev_rank())
    if is_backward:
        finalize_model_grads([model])  # reduces over data-, context- and sequence-parallel ranks
    return None if value is None else value.item()


def distributed(model: nn.Module) -> nn.Module:
    """Wrap the model in Megatron's DistributedDataParallel, which accumulates gradients in ``main_grad`` (float32)."""
    return DistributedDataParallel(
        model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False), model
    )


def _receive(shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
    tensor = torch.empty(*shape, dtype=dtype)
    dist.recv(tensor, source)
    return tensor


def _loss(logits: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    if isinstance(inputs.labels, torch.Tensor):
        total = nn.functional.cross_entropy(logits[0].float(), inputs.labels, ignore_index=-100, reduction="sum")
        return total / inputs.num_labels
    return loss(logits, inputs.labels, inputs.num_labels)
