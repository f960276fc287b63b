"""Pooling: reduce the final hidden states of a prompt to one embedding vector.

``last`` selects the state of the last prompt token, ``mean`` the mean over all prompt tokens. The result is divided by
its Euclidean norm, as in OpenAI's API. Runs on rank 0 only, as every rank has the full hidden states.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import StepPlan


def pool_step(plan: StepPlan, requests: Sequence[Request], hidden: Tensor) -> None:
    """Accumulate a step's hidden states for pooling requests, and set the embedding of each complete prompt.

    ``requests`` are the scheduled requests in plan order; ``hidden`` is [rows, hidden], after the final norm.
    """
    for slot, item, request in zip(plan.slots, plan.scheduled, requests, strict=True):
        num_prompt = len(request.prompt_ids)
        num_rows = min(len(item.tokens), num_prompt - item.position)
        if request.pooling is None or num_rows < 1:
            continue
        rows = hidden[slot : slot + num_rows].to(torch.float32)
        if request.pooling == "mean":
            earlier = request.pooled if item.position else None  # a preempted request starts over
            request.pooled = rows.sum(0) if earlier is None else earlier + rows.sum(0)
        else:
            request.pooled = rows[-1]
        if item.position + num_rows == num_prompt:
            request.embedding = tuple(torch.nn.functional.normalize(request.pooled, dim=0).tolist())
