"""Attention recomputed in numpy from queries, keys and values (Vaswani et al. 2017, arXiv 1706.03762).

Query heads share key and value heads as in grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

PADDED = -1
"""Position of a slot without a token."""
Sees = Callable[["Tokens", Array, Array], Array]
"""Mask function: (tokens, rows, keys) -> bool [rows, keys], whether each row attends to each key. Rows and keys are
indices of tokens of one request."""


@dataclass(frozen=True)
class Tokens:
    """Inputs of one attention module in one run, in float64."""

    request: Array
    """[n] index of the request; padding belongs to a request too."""
    position: Array
    """[n] position within the request, or :data:`PADDED`."""
    step: Array
    """[n] step that computed the token."""
    slot: Array
    """[n] column in the padded batch."""
    query: Array
    """[n, heads, d]."""
    key: Array
    """[n, key heads, d]."""
    value: Array
    """[n, key heads, e]."""
    cos: Array | None = None
    """[n, r] cosines of RoPE; None if queries and keys were recorded after RoPE."""
    sin: Array | None = None
    first: int = 0
    """Index of the first of the r rotated channels."""
    theta: float | None = None
    """RoPE base from which `cos` and `sin` were computed; None if a table was recorded."""


@dataclass(frozen=True)
class Variant:
    """One way to compute attention: scale, soft cap, RoPE layout, mask, and changed keys or values."""

    scale: float
    cap: float | None = None
    layout: str = "half"
    """Channel pairs that RoPE rotates: ``half`` or ``interleaved``."""
    rotated: tuple[bool, bool] = (True, True)
    """Whether (queries, keys) are rotated."""
    pairs: tuple[int, int] | None = None
    """Half-open range of channel pairs that RoPE rotates; None for all."""
    is_tiled: bool = False
    """Query head h reads key head h modulo the number of key heads, instead of h divided by the group size."""
    sees: Sees | None = None
    """Mask; None for the causal mask."""
    zeroed: Sees | None = None
    """Keys, by row, whose values count as zero."""
    where: Sees | None = None
    """Keys, by row, for which `other_key` and `other_value` are read; None for none."""
    other_key: Array | None = None
    """[n, key heads, d] replacement keys, after RoPE."""
    other_value: Array | None = None
    """[n, key heads, e] replacement values."""

    def reads(self, heads: int, groups: int) -> Array:
        """Return the key and value head that each query head reads, as [heads]."""
        return np.arange(heads) % groups if self.is_tiled else np.arange(heads) // (heads // groups)


def causal(tokens: Tokens, rows: Array, keys: Array) -> Array:
    """Return the causal mask: each row attends to the tokens of its request up to and including itself, without
    padding."""
    return ahead(0)(tokens, rows, keys)


def ahead(count: int) -> Sees:
    """Return the causal mask extended by ``count`` later tokens, or shortened if ``count`` is negative."""

    def sees(tokens: Tokens, rows: Array, keys: Array) -> Array:
        at = tokens.position[keys][None, :]
        is_seen: Array = (at != PADDED) & (at <= tokens.position[rows][:, None] + count)
        return is_seen

    return sees


def within(window: int) -> Sees:
    """Return a sliding-window mask: the last ``window`` tokens, including the row itself."""

    def sees(tokens: Tokens, rows: Array, keys: Array) -> Array:
        far = tokens.position[rows][:, None] - tokens.position[keys][None, :]
        return causal(tokens, rows, keys) & (far < window)

    return sees


def everything(tokens: Tokens, rows: Array, keys: Array) -> Array:
    """Return a mask that includes every key, even later ones and padding."""
    return np.ones((len(rows), len(keys)), bool)


def at_position(position: int) -> Sees:
    """Return a mask with the single key at this position of the request."""

    def is_there(tokens: Tokens, rows: Array, keys: Array) -> Array:
        return np.broadcast_to((tokens.position[keys] == position)[None, :], (len(rows), len(keys)))

    return is_there


def attend(tokens: Tokens, rows: Array, variant: Variant) -> Array:
    """Return the output of attention as [rows, heads x e]; rows that attend to no key are NaN."""
    heads = tokens.query.shape[1]
    reads = variant.reads(heads, tokens.key.shape[1])
    out = np.full((len(rows), heads, tokens.value.shape[2]), np.nan)
    for at, keys, weights in _weights(tokens, rows, variant):
        if variant.other_value is not None and variant.where is not None:
            other = np.where(variant.where(tokens, rows[at], keys)[None], weights, 0.0)
            weights = weights - other
            out[at] = weighted(other, variant.other_value[keys][:, reads])
        else:
            out[at] = 0.0
        out[at] += weighted(weights, tokens.value[keys][:, reads])
    return out.reshape(len(rows), -1)


def weighted(weights: Array, values: Array) -> Array:
    """Return the sum of ``values`` [keys, heads, e] weighted by ``weights`` [heads, rows, keys], as [rows, heads,
    e]."""
    output: Array = (weights @ values.transpose(1, 0, 2)).transpose(1, 0, 2)
    return output


def _products(query: Array, key: Array) -> Array:
    """Return the products of ``query`` [rows, heads, d] and ``key`` [keys, heads, d], as [heads, rows, keys]."""
    scores: Array = query.transpose(1, 0, 2) @ key.transpose(1, 2, 0)
    return scores


def weights_of(tokens: Tokens, rows: Array, variant: Variant) -> Array:
    """Return the attention weights over all tokens, as [heads, rows, n]."""
    dense = np.zeros((tokens.query.shape[1], len(rows), len(tokens.request)))
    for at, keys, weights in _weights(tokens, rows, variant):
        dense[:, at[:, None], keys[None, :]] = weights
    return dense


def _weights(tokens: Tokens, rows: Array, variant: Variant) -> Iterator[tuple[Array, Array, Array]]:
    """Yield for each request (indices into ``rows``, indices of its tokens, attention weights [heads, rows,
    tokens])."""
    reads = variant.reads(tokens.query.shape[1], tokens.key.shape[1])
    query, key = (_after_rope(tokens, variant, side) for side in (0, 1))
    for request in np.unique(tokens.request[rows]):
        at = np.flatnonzero(tokens.request[rows] == request)
        keys = np.flatnonzero(tokens.request == request)
        mine = rows[at]
        scores = variant.scale * _products(query[mine], key[keys][:, reads])
        if variant.other_key is not None and variant.where is not None:
            part = variant.other_key[keys][:, reads]
            other = variant.scale * _products(query[mine], part)
            scores = np.where(variant.where(tokens, mine, keys)[None], other, scores)
        if variant.cap:
            scores = variant.cap * np.tanh(scores / variant.cap)
        seen = (variant.sees or causal)(tokens, mine, keys) & (tokens.step[keys][None, :] <= tokens.step[mine][:, None])
        weights = _softmax(np.where(seen[None], scores, -np.inf))
        if variant.zeroed is not None:
            weights = np.where(variant.zeroed(tokens, mine, keys)[None], 0.0, weights)
        yield at, keys, weights


def applied(tokens: Tokens, variant: Variant) -> Tokens:
    """Return the tokens with RoPE applied to queries and keys, as stored in a KV cache."""
    return replace(
        tokens, query=_after_rope(tokens, variant, 0), key=_after_rope(tokens, variant, 1), cos=None, sin=None
    )


def with_theta(tokens: Tokens, theta: float) -> Tokens:
    """Return the tokens with RoPE tables computed from ``theta`` over the whole head, for runs without a recorded
    table."""
    at = np.where(tokens.position == PADDED, tokens.slot, tokens.position)
    angle = at[:, None] * inverse_frequencies(theta, tokens.query.shape[2] // 2)[None, :]
    return replace(tokens, cos=np.tile(np.cos(angle), (1, 2)), sin=np.tile(np.sin(angle), (1, 2)), theta=theta)


def inverse_frequencies(theta: float, num_pairs: int) -> Array:
    """Return the angle per position of each RoPE pair for the base ``theta``, as [num_pairs]."""
    frequencies: Array = theta ** (-np.arange(num_pairs) / num_pairs)
    return frequencies


def rotate(values: Array, cos: Array, sin: Array, layout: str) -> Array:
    """Return ``values`` [..., width] with channel pairs rotated by the angles of ``cos`` and ``sin`` [..., width / 2].

    Pairs are adjacent channels (``interleaved``), or the same index in both halves (``half``).
    """
    half = values.shape[-1] // 2
    one, two = (slice(0, half), slice(half, None)) if layout == "half" else (slice(0, None, 2), slice(1, None, 2))
    rotated = np.empty_like(values)
    rotated[..., one] = values[..., one] * cos - values[..., two] * sin
    rotated[..., two] = values[..., two] * cos + values[..., one] * sin
    return rotated


def _softmax(scores: Array) -> Array:
    """Return the softmax over the last axis; NaN where every score is masked."""
    top = scores.max(axis=-1, keepdims=True)
    raised = np.exp(scores - np.where(np.isfinite(top), top, np.nan))
    weights: Array = raised / raised.sum(axis=-1, keepdims=True)
    return weights


def _after_rope(tokens: Tokens, variant: Variant, side: int) -> Array:
    """Return the queries (``side`` 0) or keys (``side`` 1) after RoPE."""
    values = tokens.key if side else tokens.query
    if tokens.cos is None or tokens.sin is None or not variant.rotated[side]:
        return values
    width = tokens.cos.shape[1]
    cos, sin = (table[:, None, : width // 2] for table in (tokens.cos, tokens.sin))
    if variant.pairs is not None:
        inside = (np.arange(width // 2) >= variant.pairs[0]) & (np.arange(width // 2) < variant.pairs[1])
        cos, sin = np.where(inside, cos, 1.0), np.where(inside, sin, 0.0)
    span = slice(tokens.first, tokens.first + width)
    rotated = values.copy()
    rotated[..., span] = rotate(values[..., span], cos, sin, variant.layout)
    return rotated
