"""Sample draft tokens with the target's noise and masks.

Sampling with shared noise makes a draft token equal the target's own sample as often as the two distributions allow
(Gumbel coupling, arXiv:2408.07978). The first candidate of a tree is the token that the draft model samples, the next
is the one it would sample with the first masked, and so on.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import StepPlan
from tapscope.engine.sampling.sampler import Sampler

Compute = Callable[[StepPlan, Callable[[Tensor], Tensor]], list[int]]
"""Run a plan of the draft model on every rank: numbers the step and returns the sampled tokens. The second argument
maps logits [logit rows, vocab] to tokens.
"""


def draw_drafts(
    sampler: Sampler, logits: Tensor, vocab_size: int, requests: Sequence[tuple[Request, Sequence[int]]]
) -> Tensor:
    """Sample one token for each row of ``logits`` [rows, draft vocab]; NO_TOKEN if no token may follow.

    ``requests``: the request of each row and its draft tokens so far. ``vocab_size``: columns of the target's logits,
    from which a draft model's padded vocabulary may differ.
    """
    return sampler.draw(*_inputs(logits, vocab_size, requests))[0]


def draw_candidates(
    sampler: Sampler, logits: Tensor, vocab_size: int, requests: Sequence[tuple[Request, Sequence[int]]], count: int
) -> tuple[Tensor, Tensor]:
    """Return the ``count`` most likely tokens of each row and their log-probabilities, [rows, count] each.

    Log-probabilities are given the noise; -inf for a token that may not follow. The other arguments are those of
    :func:`draw_drafts`.
    """
    noisy, _, dead = sampler.noisy_scores(*_inputs(logits, vocab_size, requests))
    best, tokens = noisy.float().log_softmax(-1).topk(min(count, vocab_size), dim=-1)
    best[dead] = -torch.inf
    return tokens, best


def _inputs(
    logits: Tensor, vocab_size: int, requests: Sequence[tuple[Request, Sequence[int]]]
) -> tuple[Tensor, list[Request], list[int], list[Sequence[int]]]:
    surplus = logits.shape[1] - vocab_size
    if surplus > 0:
        logits = logits[:, :vocab_size]
    elif surplus < 0:
        logits = functional.pad(logits, (0, -surplus), value=-torch.inf)
    positions = [len(request.tokens) + len(drafts) for request, drafts in requests]
    return logits, [request for request, _ in requests], positions, [drafts for _, drafts in requests]
