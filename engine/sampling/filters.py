"""Sampling filters top-k, top-p and min-p: logits of removed tokens become -inf.

Formulas and order follow transformers' logits warpers (generation/logits_process.py): temperature, top-k, top-p, min-p.
Tokens that tie with the last kept token are kept too, so that the result does not depend on sort order.
"""

import torch
from torch import Tensor

from tapscope.engine.layers.vector_stable_ops import vector_stable

_HEAD = 1024  # most likely tokens, sorted first: these nearly always contain the nucleus


def keep_top_k(scores: Tensor, top_k: Tensor) -> Tensor:
    """Keep each row's ``top_k`` [rows] int64 largest of the scores [rows, vocab]; 0 keeps all."""
    vocab = scores.shape[1]
    rank = top_k.clamp(max=vocab)
    largest = scores.topk(max(1, int(rank.max())), dim=-1).values
    floor = largest.gather(1, (rank - 1).clamp(min=0).unsqueeze(1))
    return scores.masked_fill((scores < floor) & (top_k > 0).unsqueeze(1), -torch.inf)


def keep_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    """Keep each row's nucleus of [rows, vocab]: the fewest tokens whose probabilities reach ``top_p`` [rows].

    A token is kept if the total probability of more likely tokens is below ``top_p``, so the token that crosses the
    threshold is kept.
    """
    probabilities, wanted = scores.softmax(-1), top_p.unsqueeze(1)
    head = probabilities.topk(min(_HEAD, scores.shape[1]), dim=-1).values
    floor, total = _nucleus(head, wanted)
    wide = (total < wanted).squeeze(1).nonzero().squeeze(1)  # rows whose nucleus is larger than the head
    if len(wide) and head.shape[1] < scores.shape[1]:
        whole = probabilities[wide].sort(dim=-1, descending=True).values
        floor[wide] = _nucleus(whole, wanted[wide])[0]
    return scores.masked_fill((probabilities < floor) & (wanted < 1), -torch.inf)


def _nucleus(descending: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return (smallest kept probability [rows, 1], sum of all [rows, 1]) of descending probabilities [rows, n]."""
    total = descending.cumsum(-1, dtype=torch.float64)
    num_kept = (total - descending < wanted).sum(-1, keepdim=True)
    return descending.gather(1, (num_kept - 1).clamp(min=0)), total[:, -1:]


def keep_min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    """Keep tokens of [rows, vocab] with at least ``min_p`` [rows] times the row's maximum probability."""
    floor = scores.amax(-1, keepdim=True) + vector_stable(torch.log, min_p).unsqueeze(1)  # log 0 is -inf: keeps all
    return scores.masked_fill(scores < floor, -torch.inf)
