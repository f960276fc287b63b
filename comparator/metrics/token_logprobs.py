"""Token log-probabilities: the log-probability of each next token under both runs' logits, row by row."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import Struct

from tapscope.comparator.alignment.prepare import PreparedPair
from tapscope.comparator.alignment.row_map import RowMap
from tapscope.comparator.metrics import chunks

Array = np.ndarray[Any, Any]


class TokenLogprobs(Struct, frozen=True):
    """Log-probabilities of tokens whose logits both runs have, ordered by request and position."""

    request: Array
    """[tokens] int64: index into the row map's requests."""
    position: Array
    """[tokens] int64: position of the token itself; its logits are those of the previous row."""
    token: Array
    """[tokens] int64: token id."""
    baseline: Array
    """[tokens] float64: log softmax(logits / temperature)[token], in nats."""
    target: Array
    kl: Array
    """[tokens] float64: KL(softmax(target) || softmax(baseline)) over the vocabulary, in nats."""
    num_unknown: int
    """Number of rows without a known next token, such as the last row of a request."""
    num_nonfinite: int
    """Number of rows that were left out because a logit is NaN or infinite."""


def token_logprobs(
    ready: PreparedPair, rows: RowMap, next_tokens: Mapping[str, Mapping[int, int]], temperature: float
) -> TokenLogprobs:
    """Compute log-probabilities from logits [rows, vocabulary] of a pair with token rows, in float64.

    ``next_tokens`` maps request -> position -> token id. Raises RunCorruptError if bytes are missing.
    """
    collected: list[tuple[Array, ...]] = []
    num_unknown = num_nonfinite = 0
    for chunk in chunks.rows(ready, every=True):
        assert chunk.join.pairs is not None
        pairs = chunk.join.pairs[chunk.row : chunk.row + len(chunk.baseline)]
        request, position = rows.pair_request[pairs], rows.pair_position[pairs] + 1
        names = [rows.requests[number] for number in request.tolist()]
        token = np.array([next_tokens[n].get(p, -1) for n, p in zip(names, position.tolist(), strict=True)], np.int64)
        known = (token >= 0) & (token < chunk.baseline.shape[1])
        sides = [side[known].astype(np.float64) / temperature for side in (chunk.baseline, chunk.target)]
        sound = np.isfinite(sides[0]).all(1) & np.isfinite(sides[1]).all(1)
        num_unknown, num_nonfinite = num_unknown + int((~known).sum()), num_nonfinite + int((~sound).sum())
        baseline, target = (_log_softmax(side[sound]) for side in sides)
        token, request, position = token[known][sound], request[known][sound], position[known][sound]
        kl = np.maximum((np.exp(target) * (target - baseline)).sum(1), 0.0)
        index = np.arange(len(token))
        collected.append((request, position, token, baseline[index, token], target[index, token], kl))
    if not collected:
        collected = [tuple(np.empty(0) for _ in range(6))]
    request, position, token, baseline, target, kl = (np.concatenate(parts) for parts in zip(*collected, strict=True))
    at = np.lexsort((position, request))
    return TokenLogprobs(
        request[at], position[at], token[at], baseline[at], target[at], kl[at], num_unknown, num_nonfinite
    )


def _log_softmax(logits: Array) -> Array:
    """Compute the log-softmax of logits [rows, vocabulary] float64."""
    shifted = logits - logits.max(1, keepdims=True, initial=-np.inf)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))
