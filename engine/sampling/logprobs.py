"""Log-probabilities of given tokens and of the most likely ones."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tapscope.engine.requests.token_logprob import TokenLogprob

_ROWS = 64  # rows in float32 at a time: bounds the memory of a long prompt


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """The log-probabilities to compute from one row of scores."""

    row: int
    token: int
    """Token id."""
    num_top: int
    chosen: tuple[int, ...] = ()
    """Further token ids."""
    full: bool = False


def token_logprobs(scores: Tensor, wanted: Sequence[LogprobRequest]) -> Iterator[TokenLogprob]:
    """One result for each of ``wanted``, in order, from logits [rows, vocab] of any dtype; log_softmax in float32."""
    for start in range(0, len(wanted), _ROWS):
        yield from _chunk_logprobs(scores, wanted[start : start + _ROWS])


def _chunk_logprobs(scores: Tensor, wanted: Sequence[LogprobRequest]) -> Iterator[TokenLogprob]:
    device = scores.device
    rows = scores[torch.tensor([item.row for item in wanted], device=device)]
    values = rows.float().log_softmax(-1)
    tokens = torch.tensor([item.token for item in wanted], device=device)
    chosen = values.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
    top = values.topk(max(item.num_top for item in wanted), dim=-1)
    likely, ids = top.values.tolist(), top.indices.tolist()
    for i, item in enumerate(wanted):
        yield TokenLogprob(
            token_id=item.token,
            logprob=chosen[i],
            top=tuple(zip(ids[i][: item.num_top], likely[i][: item.num_top], strict=True)),
            chosen=tuple(zip(item.chosen, values[i, list(item.chosen)].tolist(), strict=True)) if item.chosen else (),
            full=tuple(values[i].tolist()) if item.full else None,
        )
