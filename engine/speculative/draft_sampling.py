"""Draws draft tokens with the target's noise and masks.

A draft token is then the target's own draw as often as the two distributions allow (Gumbel coupling, arXiv:2408.07978).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import StepPlan
from tapscope.engine.sampling.sampler import Sampler

Compute = Callable[[StepPlan, Callable[[Tensor], Tensor]], list[int]]
"""Computes a plan of the draft model on every rank, given what maps logits [logit rows, vocab] to tokens; numbers the
step and returns the sampled tokens."""


def draw_drafts(
    sampler: Sampler, logits: Tensor, vocab_size: int, requests: Sequence[tuple[Request, Sequence[int]]]
) -> Tensor:
    """Logits [rows, draft vocab] of the rows that predict a token -> one token for each.

    ``requests``: the request of each row and its draft tokens so far; ``vocab_size``: columns of the target's logits,
    from which a draft model's padded vocabulary may differ.
    """
    surplus = logits.shape[1] - vocab_size
    if surplus > 0:
        logits = logits[:, :vocab_size]
    elif surplus < 0:
        logits = functional.pad(logits, (0, -surplus), value=-torch.inf)
    positions = [len(request.tokens) + len(drafts) for request, drafts in requests]
    return sampler.draw(logits, [request for request, _ in requests], positions, [drafts for _, drafts in requests])[0]
