"""Attention variants: candidate bugs of an attention module, each with a sentence and the computation that it
implies."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.explain.attention import (
    PADDED,
    Sees,
    Tokens,
    Variant,
    ahead,
    applied,
    at_position,
    attend,
    causal,
    everything,
    with_theta,
    within,
)
from tapscope.comparator.explain.cache_slots import slot_changes
from tapscope.comparator.explain.cached_keys import cached_key_changes
from tapscope.comparator.explain.cached_values import cached_value_changes
from tapscope.comparator.explain.search import searched

Array = np.ndarray[Any, Any]

MAX_POSITION = 4
"""Number of leading positions of a request whose keys are masked one at a time."""
MAX_WINDOW = 64
"""Largest window up to which all sizes are tried; beyond it, only powers of two."""
PAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""KV cache page sizes that are tried, in tokens."""
MAX_PAGES = 8
"""Number of leading pages of a request that are tried."""
USUAL_THETAS = (10000.0, 500000.0, 1000000.0, 100000.0, 50000.0, 5000000.0, 10000000.0)
"""RoPE bases in common use."""


class Candidate(NamedTuple):
    """One candidate bug."""

    name: str
    sentence: str
    variant: Variant
    cost: int
    """Number of fitted parameters; if two candidates fit equally well, the cheaper one wins."""
    tokens: Tokens | None = None
    """Changed inputs of the computation; None for the recorded inputs."""


def candidates(
    tokens: Tokens, rows: Array, wanted: Array, variant: Variant, window: int | None, noise: float
) -> Iterator[Candidate]:
    """Yield all candidates; ``wanted`` [rows, width] is the target's output for the tokens ``rows``."""
    yield from _rotations(tokens, variant)
    heads, groups = tokens.query.shape[1], tokens.key.shape[1]
    if 1 < groups < heads:
        text = "target's query heads read key and value heads in tiled order (h mod n), baseline in groups"
        yield Candidate(
            "grouped queries", f"{text} (grouped queries)", replace(variant, is_tiled=not variant.is_tiled), 0
        )
    if variant.cap is not None:
        yield Candidate(
            "soft cap", f"target lacks the soft cap of scores, {variant.cap:g}", replace(variant, cap=None), 0
        )
    for name, sentence, sees, cost in _masks(tokens, rows, window):
        yield Candidate(name, sentence, replace(variant, sees=sees), cost)
    for what, hidden in _hidden(tokens, rows):
        yield Candidate("mask", f"target does not see {what}", replace(variant, sees=_without(variant, hidden)), 1)
        text = f"the value of {what} counts as zero in target, its key is seen"
        yield Candidate("cache", text, replace(variant, zeroed=hidden), 1)
    yield from _scales(tokens, rows, wanted, variant)
    yield from _thetas(tokens, rows, wanted, variant)
    yield from _cached(tokens, rows, wanted, variant)
    for change in slot_changes(applied(tokens, variant), rows, wanted, variant):
        text = f"target's cache is wrong: {change.sentence}"
        yield Candidate("cache", text, change.variant, 3, change.tokens)
    for text, other, cost in cached_value_changes(tokens, rows, wanted, variant, noise):
        yield Candidate(f"cached values: {text}", text, other, cost)
    for text, other, cost in cached_key_changes(tokens, rows, wanted, variant, noise):
        yield Candidate(f"cached keys: {text}", text, other, cost)


def _rotations(tokens: Tokens, variant: Variant) -> Iterator[Candidate]:
    if tokens.cos is None:
        return
    other = "interleaved" if variant.layout == "half" else "half"
    pair_names = {"half": "halves", "interleaved": "interleaved pairs"}
    text = f"target rotates {pair_names[other]} of each head, baseline {pair_names[variant.layout]} (RoPE layout)"
    yield Candidate("rope layout", text, replace(variant, layout=other), 0)
    for rotated, text in (
        ((False, False), "queries and keys are not rotated in target (RoPE)"),
        ((True, False), "keys are not rotated in target, queries only (RoPE)"),
        ((False, True), "queries are not rotated in target, keys only (RoPE)"),
    ):
        yield Candidate("rope", text, replace(variant, rotated=rotated), 0)
    count = tokens.cos.shape[1] // 2
    quarter = max(count // 4, 1)
    for low, high in [(a, b) for a in range(0, count, quarter) for b in range(a + quarter, count + 1, quarter)]:
        if (low, high) != (0, count):
            text = f"target rotates pairs {low} to {high - 1} of {count} only, other channels are not rotated"
            yield Candidate("rope", f"{text} (partial RoPE)", replace(variant, pairs=(low, high)), 1)


def _thetas(tokens: Tokens, rows: Array, wanted: Array, variant: Variant) -> Iterator[Candidate]:
    """Yield the RoPE base that fits best, or a usual base that fits as well; only if no table was recorded."""
    if tokens.theta is None:
        return

    def off(theta: float) -> float:
        return float(np.nansum((attend(with_theta(tokens, theta), rows, variant) - wanted) ** 2))

    best, error = searched(off, 1e2, 1e8)
    usual = [theta for theta in USUAL_THETAS if off(theta) <= 1.1 * error]
    theta = usual[0] if usual else best
    text = f"RoPE with theta {theta:.4g} in target against {tokens.theta:.4g} in baseline"
    yield Candidate("rope theta", text, variant, 2, with_theta(tokens, theta))


def _masks(tokens: Tokens, rows: Array, window: int | None) -> Iterator[tuple[str, str, Sees, int]]:
    yield "mask", "a token of target sees the next token too (1 key more)", ahead(1), 0
    text = "a token of target does not see itself: its own key, the newest, is left out"
    yield "mask", text, ahead(-1), 0
    yield "mask", "target's mask is lost: it is not causal, later tokens are seen", _later, 0
    if (tokens.position == PADDED).any():
        yield "mask", "target's mask is lost: later tokens and padding are seen", everything, 0
        yield "mask", "target's mask lets padding be seen", _padding, 0
    text = "target's mask is aligned top-left: a step's first token sees the first key alone, its second two, …"
    yield "mask", text, _top_left, 0
    yield "mask", "target sees the tokens of the same step alone, earlier keys are missing", _same_step, 0
    longest = int(tokens.position[rows].max(initial=0)) + 1
    if window is not None:
        yield "window", f"target has no window, baseline one of {window} tokens", causal, 0
    sizes = [*range(2, min(MAX_WINDOW, longest)), *(n for n in (128, 256, 512, 1024, 2048, 4096) if n < longest)]
    for size in sizes:
        if size != window:
            near = f", {abs(size - window)} {'more' if size > window else 'less'} than baseline" if window else ""
            yield "window", f"target sees the last {size} tokens (a window of {size}{near})", within(size), 1


def _hidden(tokens: Tokens, rows: Array) -> Iterator[tuple[str, Sees]]:
    yield "the token before the step (the last of the chunk before)", _before_step
    yield "the token before its own", _previous
    for position in range(min(MAX_POSITION, int(tokens.position[rows].max(initial=0)))):
        yield f"position {position}", at_position(position)


def _later(tokens: Tokens, rows: Array, keys: Array) -> Array:
    return np.broadcast_to((tokens.position[keys] != PADDED)[None, :], (len(rows), len(keys)))


def _padding(tokens: Tokens, rows: Array, keys: Array) -> Array:
    is_seen: Array = causal(tokens, rows, keys) | (tokens.position[keys] == PADDED)[None, :]
    return is_seen


def _start(tokens: Tokens, rows: Array) -> Array:
    """Return the first position of each row's request in the row's step, as [rows]."""
    first = np.empty(len(rows), np.int64)
    for i, row in enumerate(rows):
        here = (tokens.request == tokens.request[row]) & (tokens.step == tokens.step[row])
        first[i] = tokens.position[here & (tokens.position != PADDED)].min()
    return first


def _top_left(tokens: Tokens, rows: Array, keys: Array) -> Array:
    at = tokens.position[keys][None, :]
    is_seen: Array = (at != PADDED) & (at <= (tokens.position[rows] - _start(tokens, rows))[:, None])
    return is_seen


def _same_step(tokens: Tokens, rows: Array, keys: Array) -> Array:
    is_seen: Array = causal(tokens, rows, keys) & (tokens.step[keys][None, :] == tokens.step[rows][:, None])
    return is_seen


def _before_step(tokens: Tokens, rows: Array, keys: Array) -> Array:
    at = tokens.position[keys][None, :]
    is_last: Array = (at == (_start(tokens, rows) - 1)[:, None]) & (at != PADDED)
    return is_last


def _previous(tokens: Tokens, rows: Array, keys: Array) -> Array:
    at = tokens.position[keys][None, :]
    is_previous: Array = (at == (tokens.position[rows] - 1)[:, None]) & (at != PADDED)
    return is_previous


def _without(variant: Variant, hidden: Sees) -> Sees:
    def sees(tokens: Tokens, rows: Array, keys: Array) -> Array:
        is_seen: Array = (variant.sees or causal)(tokens, rows, keys) & ~hidden(tokens, rows, keys)
        return is_seen

    return sees


def _scales(tokens: Tokens, rows: Array, wanted: Array, variant: Variant) -> Iterator[Candidate]:
    """Yield the best-fitting factor of the scores."""

    def off(factor: float) -> float:
        made = attend(tokens, rows, replace(variant, scale=variant.scale * factor))
        return float(np.nansum((made - wanted) ** 2))

    best, _ = searched(off, 1 / 64, 64.0)
    d = tokens.query.shape[2]
    scale = best * variant.scale
    known = {1.0: "1", 1.0 / d: f"1 / head_dim ({d})", d**-0.5: f"1 / √head_dim ({d})", float(d) ** 0.5: "√head_dim"}
    name = next((f" = {text}" for value, text in known.items() if abs(scale / value - 1) < 0.01 and text != "1"), "")
    text = f"target scales scores by {scale:.4g}{name}, {best:.4g} × baseline's {variant.scale:.4g}"
    yield Candidate("softmax scale", text, replace(variant, scale=scale), 2)


def _cached(tokens: Tokens, rows: Array, wanted: Array, variant: Variant) -> Iterator[Candidate]:
    """Yield a KV cache that holds keys or values of other tokens: a wrong page, or the slots of another request."""
    held = given = applied(tokens, variant)
    off = np.nansum((attend(held, rows, variant) - wanted) ** 2, axis=1)
    sentences = []
    for request in np.unique(tokens.request[rows]):
        at = np.flatnonzero(tokens.request[rows] == request)
        worst = int(at[np.argmax(off[at])])
        row, target = rows[worst : worst + 1], wanted[worst]
        tried = _moved(given, int(request), int(tokens.position[row[0]]))
        moves = [
            (float(np.nansum((attend(_filled(given, given, move), row, variant)[0] - target) ** 2)), move)
            for move in tried
        ]
        if not moves:
            return
        move = min(moves, key=lambda one: one[0])[1]
        held = _filled(held, given, move)
        sentences.append(move.sentence)
    yield Candidate("cache", "target's cache is wrong: " + "; ".join(dict.fromkeys(sentences)), variant, 3, held)


class _Move(NamedTuple):
    """Tokens whose keys or values are replaced by those of other tokens."""

    sentence: str
    span: list[int]
    source: list[int]
    names: tuple[str, ...]


def _moved(tokens: Tokens, mine: int, last: int) -> Iterator[_Move]:
    """Yield pages of a request that hold another page, and slots that hold another request's token of the same step."""
    places = zip(tokens.request.tolist(), tokens.position.tolist(), strict=True)
    at = {place: i for i, place in enumerate(places) if place[1] != PADDED}
    requests = sorted({request for request, _ in at})
    for size in PAGES:
        pages = [range(first, first + size) for first in range(0, min(MAX_PAGES * size, last + 2 - size), size)]
        for page, other, from_ in product(pages, requests, pages):
            span, source = ([at.get((one, i), -1) for i in there] for one, there in ((mine, page), (other, from_)))
            if (other, from_) == (mine, page) or min(span) < 0 or min(source) < 0:
                continue
            whose = "those" if other == mine else "another request's,"
            text = f"keys and values of {_span(page)} are {whose} of {_span(from_)} (a wrong page)"
            yield _Move(text, span, source, ("key", "value"))
    for other in requests:
        if other != mine:
            yield from _exchanged(tokens, at, (mine, other), last)


def _span(positions: range) -> str:
    return f"position {positions[0]}" if len(positions) == 1 else f"positions {positions[0]}–{positions[-1]}"


def _exchanged(tokens: Tokens, at: dict[tuple[int, int], int], requests: tuple[int, int], last: int) -> Iterator[_Move]:
    """Yield slots exchanged with another request, in the steps in which both requests had one token."""
    by_step: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})
    for (request, position), i in at.items():
        if request in requests and position <= (last if request == requests[0] else position):
            by_step[requests.index(request)].setdefault(int(tokens.step[i]), []).append(i)
    mine, other = ({step: i[0] for step, i in side.items() if len(i) == 1} for side in by_step)
    steps = sorted(set(mine) & set(other))
    for names in (("key",), ("value",), ("key", "value")) if steps else ():
        text = f"{' and '.join(f'{name}s' for name in names)} are another request's of the same step (exchanged slots)"
        yield _Move(text, [mine[step] for step in steps], [other[step] for step in steps], names)


def _filled(tokens: Tokens, given: Tokens, move: _Move) -> Tokens:
    """Return ``tokens`` with keys (after RoPE) or values replaced by those of other tokens of ``given``, according to
    ``move``."""
    changed: dict[str, Any] = {}
    for name in move.names:
        values = getattr(tokens, name).copy()
        values[move.span] = getattr(given, name)[move.source]
        changed[name] = values
    return replace(tokens, **changed)
