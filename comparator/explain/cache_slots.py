"""Cache slots: one slot of the KV cache holds another token's key or value, or none.

For one output row, the effect of changing slot j has a closed form, so that all pairs of slots are tried. With the
attention weights w, values v, output o and the target's row t, storing key and value of token i in slot j leaves

    o' - t = (o - t - w_j (v_j - t) + w_i (v_i - t)) / (1 - w_j + w_i)

in each head. One matrix product gives the squared norms for all j and i.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.explain.attention import Sees, Tokens, Variant, attend, causal

Array = np.ndarray[Any, Any]

MAX_PRODUCTS = 1 << 31
"""Limit on multiplications over all affected requests, about 1 s. Their number grows with the square of the request
length: one request of 700 tokens with 32 heads of 128 channels reaches the limit."""


class SlotChange(NamedTuple):
    """Changed slots of the target's cache, one per request and all of one kind."""

    kind: str
    """``token``, ``value``, ``key``, ``empty`` or ``hidden``."""
    sentence: str
    tokens: Tokens
    variant: Variant


_KINDS = ("token", "value", "key", "empty", "hidden")


def slot_changes(tokens: Tokens, rows: Array, wanted: Array, variant: Variant) -> Iterator[SlotChange]:
    """Yield the best change of each kind; ``tokens`` have RoPE applied, ``wanted`` [rows, width] is the target's
    output."""
    off = np.nansum((attend(tokens, rows, variant) - wanted) ** 2, axis=1)
    found: dict[str, list[tuple[int, int]]] = {kind: [] for kind in _KINDS}
    requests = np.unique(tokens.request[rows])
    lengths = np.array([(tokens.request == request).sum() for request in requests], np.float64)
    if float((lengths**2).sum()) * wanted.shape[1] > MAX_PRODUCTS:
        return
    for request in requests:
        at = np.flatnonzero(tokens.request[rows] == request)
        worst = int(at[np.argmax(off[at])])
        for kind, slot, source in _best(tokens, int(rows[worst]), wanted[worst], variant):
            found[kind].append((slot, source))
    for kind, moves in found.items():
        if len(moves) == len(requests):
            sentence = "; ".join(dict.fromkeys(_sentence(tokens, kind, *move) for move in moves))
            yield SlotChange(kind, sentence, *_changed(tokens, variant, kind, moves))


def _best(tokens: Tokens, row: int, target: Array, variant: Variant) -> Iterator[tuple[str, int, int]]:
    """Yield for each kind (kind, token of the changed slot, token it holds instead) with the smallest error in one
    target row."""
    keys = np.flatnonzero(tokens.request == tokens.request[row])
    seen = (variant.sees or causal)(tokens, np.array([row]), keys)[0] & (tokens.step[keys] <= tokens.step[row])
    keys = keys[seen]
    if len(keys) < 2 or not np.isfinite(target).all():
        return
    heads = tokens.query.shape[1]
    reads = variant.reads(heads, tokens.key.shape[1])
    scores = variant.scale * np.einsum("hd,nhd->hn", tokens.query[row], tokens.key[keys][:, reads])
    if variant.cap:
        scores = variant.cap * np.tanh(scores / variant.cap)
    top = scores.max(axis=1, keepdims=True)
    total = np.exp(scores - top).sum(axis=1, keepdims=True)
    weights, nothing = np.exp(scores - top) / total, (np.exp(-top) / total)[:, 0]
    errors = {kind: np.zeros((len(keys), len(keys) if kind in _KINDS[:3] else 1)) for kind in _KINDS}
    with np.errstate(divide="ignore", invalid="ignore"):
        for head, wanted in enumerate(target.reshape(heads, -1)):
            _add_errors(errors, weights[head], tokens.value[keys, reads[head]], wanted, float(nothing[head]))
    for kind, error in errors.items():
        if error.shape[1] > 1:
            np.fill_diagonal(error, np.inf)
        slot, source = np.unravel_index(int(np.argmin(np.where(np.isnan(error), np.inf, error))), error.shape)
        yield kind, int(keys[slot]), int(keys[source])


def _add_errors(errors: dict[str, Array], weights: Array, values: Array, target: Array, nothing: float) -> None:
    """Add one head's squared errors [slots, sources]; ``nothing`` is the attention weight of an all-zero key."""
    left = weights @ values - target
    values = values - target  # shifting all values shifts the output equally
    moved = weights[:, None] * values
    products, along = moved @ moved.T, moved @ left
    norm, sizes = float(left @ left), np.diag(products)
    gained = weights[None, :] - weights[:, None]  # [slots, sources]
    whole = norm + (sizes - 2 * along)[:, None] + (sizes + 2 * along)[None, :] - 2 * products
    errors["token"] += whole / (1 + gained) ** 2
    rest = left[None, :] - moved
    squares = (values**2).sum(axis=1)
    errors["value"] += (
        (rest**2).sum(axis=1)[:, None]
        + 2 * weights[:, None] * (rest @ values.T)
        + weights[:, None] ** 2 * squares[None, :]
    )
    errors["key"] += (norm + 2 * gained * (values @ left)[:, None] + gained**2 * squares[:, None]) / (1 + gained) ** 2
    empty = (rest - nothing * target) / (1 - weights + nothing)[:, None]
    errors["empty"] += (empty**2).sum(axis=1, keepdims=True)
    hidden = rest / (1 - weights)[:, None]
    errors["hidden"] += (hidden**2).sum(axis=1, keepdims=True)


def _sentence(tokens: Tokens, kind: str, slot: int, source: int) -> str:
    here, there = int(tokens.position[slot]), int(tokens.position[source])
    if kind == "empty":
        return f"the slot of position {here} was not written: its key and value are zero"
    if kind == "hidden":
        return f"the slot of position {here} is not read"
    what = {"token": "key and value", "value": "value", "key": "key"}[kind]
    return f"the slot of position {here} has the {what} of position {there}"


def _changed(tokens: Tokens, variant: Variant, kind: str, moves: list[tuple[int, int]]) -> tuple[Tokens, Variant]:
    slots, sources = (list(each) for each in zip(*moves, strict=True))
    if kind == "hidden":
        return tokens, replace(variant, sees=_all_but(slots, variant.sees or causal))
    key, value = tokens.key.copy(), tokens.value.copy()
    if kind in ("token", "key"):
        key[slots] = tokens.key[sources]
    if kind in ("token", "value"):
        value[slots] = tokens.value[sources]
    if kind == "empty":
        key[slots], value[slots] = 0.0, 0.0
    return replace(tokens, key=key, value=value), variant


def _all_but(slots: list[int], seen: Sees) -> Sees:
    def sees(tokens: Tokens, rows: Array, keys: Array) -> Array:
        is_seen: Array = seen(tokens, rows, keys) & ~np.isin(keys, slots)[None, :]
        return is_seen

    return sees
