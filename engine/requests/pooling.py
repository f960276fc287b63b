"""Pooling: the final hidden states of a prompt as one vector, for embeddings. Rank 0 only; every rank has them whole.

``last`` is the state at the prompt's last token, which alone has seen all of it; ``mean`` the mean over all its tokens.
Either is divided by its length (the Euclidean norm), as OpenAI's embeddings are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import StepPlan

POOLINGS = ("last", "mean")


def pool_step(plan: StepPlan, requests: Sequence[Request], hidden: Tensor) -> None:
    """Add a step's rows to the requests (one for each share) that pool; those whose prompt ends get their embedding.

    ``hidden`` is [rows, hidden], behind the final norm.
    """
    for slot, item, request in zip(plan.slots, plan.scheduled, requests, strict=True):
        num_prompt = len(request.prompt_ids)
        num_rows = min(len(item.tokens), num_prompt - item.position)
        if request.pooling is None or num_rows < 1:
            continue
        rows = hidden[slot : slot + num_rows].to(torch.float32)
        if request.pooling == "mean":
            earlier = request.pooled if item.position else None  # a preempted request begins anew
            request.pooled = rows.sum(0) if earlier is None else earlier + rows.sum(0)
        else:
            request.pooled = rows[-1]
        if item.position + num_rows == num_prompt:
            request.embedding = tuple(torch.nn.functional.normalize(request.pooled, dim=0).tolist())
