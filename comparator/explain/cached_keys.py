"""Cached keys: infer from the attention output how the keys that attention reads differ from the computed keys.

The output is a weighted sum of values. If a row attends to no more keys than a head has channels, its output determines
the weights, and their logarithms determine the scores up to one constant per row. A score is linear in the key: the
change of the key channels is fitted by least squares, with each score weighted by its standard error.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.explain.attention import Tokens, Variant, applied, attend, weights_of
from tapscope.comparator.explain.cached_values import (
    AS_READ,
    NARROW,
    candidate_token_sets,
    channels_text,
    number,
    rows_that_differ,
    seen_by,
    with_channels,
)
from tapscope.comparator.explain.casts import cast_through
from tapscope.comparator.explain.column_order import order_text
from tapscope.comparator.explain.predictions import MAX_ROUNDING_RATIO
from tapscope.core import dtypes

Array = np.ndarray[Any, Any]

MAX_WEIGHTS = 1 << 22
MAX_EQUATIONS = 1000
MAX_SEARCHED = 12
"""Maximum number of token sets for which the slower searches run."""
MAX_PAIRS = 1 << 12
"""Limit on channel pairs in the search for moved channels."""
PER_NUMBER = 4
"""Minimum number of scores per fitted parameter."""
_MIN_STANDARD_ERRORS = 5.0
"""Number of standard errors beyond which a parameter differs from 0."""
_ZERO_SHARE = 0.02
"""Fraction of the largest parameter below which a parameter counts as 0."""
_MAX_SCATTER = 0.02
"""Maximum relative scatter of parameters that count as one common number."""
MAX_FEW = 120
"""Maximum number of scores used in the search for one run of channels."""
MAX_RUN_WIDTH = 128
MIN_BITS = 40.0
"""Bits of evidence required for a run of channels: there are thousands of runs."""
MIN_ENERGY_RATIO = 4.0
"""Minimum ratio of the residual energy of the second best run to that of the best run."""
_NUM_ROUNDS = 2
_NUM_CLAMP_LIMITS = 16
"""Number of clamp limits tried."""


class Scores(NamedTuple):
    """Changes of attention scores with their least-squares weights; each (row, head) pair has a free constant."""

    query: Array
    """[n, d] queries after RoPE, times the scale."""
    key: Array
    """[n, d] keys after RoPE."""
    change: Array
    """[n] change of the score."""
    weight: Array
    """[n] weight in the least-squares fit: 1 / standard error."""
    row: Array
    """[n] index of the (row, head) pair, ascending; the scores of one pair are known up to a constant."""
    token: Array
    """[n] token of the key; -1 for all unchanged tokens combined."""
    reader: Array
    """[n] index of the row that reads the key."""

    def centred(self, columns: Array) -> Array:
        """Return ``columns`` [n, m] minus the weighted mean of each (row, head) pair, multiplied by the weights."""
        starts = np.flatnonzero(np.diff(self.row, prepend=-1))
        energy = (self.weight**2)[:, None]
        mean = np.add.reduceat(energy * columns, starts, axis=0) / np.add.reduceat(energy, starts, axis=0)
        centred: Array = self.weight[:, None] * (columns - np.repeat(mean, np.diff([*starts, len(columns)]), axis=0))
        return centred


class _Change(NamedTuple):
    """A candidate change of the keys."""

    sentence: str
    """Sentence with ``{}`` in place of the fitted number."""
    keys: Array
    """Changed keys; with a fitted number, ``keys + number * more``."""
    cost: int
    number: float | None = None
    more: Any = None


def cached_key_changes(
    tokens: Tokens, rows: Array, wanted: Array, variant: Variant, noise: float
) -> Iterator[tuple[str, Variant, int]]:
    """Yield (sentence, variant, cost) of candidate changes of the keys; ``wanted`` [rows, width] is the target's
    output."""
    if variant.cap or len(rows) * tokens.query.shape[1] * len(tokens.request) > MAX_WEIGHTS:
        return
    held = applied(tokens, variant)
    off = attend(tokens, rows, variant) - wanted
    questions = list(candidate_token_sets(tokens, rows, rows_that_differ(off, wanted, noise)))
    limit = (MAX_ROUNDING_RATIO * noise) ** 2 * float((wanted**2).sum())
    known = [scores_of(held, rows, wanted, variant, noise, seen_by(tokens, rows, span.covers)) for span in questions]
    for search, some in ((_fitted_changes, questions), (_searched_changes, questions[:MAX_SEARCHED])):
        best = np.inf
        for span, scores in zip(some, known, strict=False):
            for change in search(held.key, scores, scores.token >= 0):
                sentence, other = _refined(change, tokens, rows, wanted, replace(variant, where=span.covers))
                best = min(best, float(np.nansum((attend(tokens, rows, other) - wanted) ** 2)))
                yield f"keys {sentence} {AS_READ}{span.suffix}", other, change.cost + bool(span.sentence)
            if best <= limit and search is _searched_changes:
                return
        if best <= limit:
            return


def _of_all(keys: Array) -> Iterator[_Change]:
    """Yield changes that need no search."""
    yield _Change("are zero", np.zeros_like(keys), 1)
    yield _Change("are negated", -keys, 1)
    for name in NARROW:
        yield _Change(f"are rounded to {dtypes.short(name)}", cast_through(keys, name), 1)


def _refined(change: _Change, tokens: Tokens, rows: Array, wanted: Array, variant: Variant) -> tuple[str, Variant]:
    """Return (sentence, variant) with the number refined so that the output fits ``wanted`` best (Gauss-Newton)."""
    if change.number is None:
        return change.sentence, replace(variant, other_key=change.keys)
    value = change.number
    for _ in range(_NUM_ROUNDS):
        step = 1e-4 * max(abs(value), 1e-3)
        at, near = (
            attend(tokens, rows, replace(variant, other_key=change.keys + x * change.more))
            for x in (value, value + step)
        )
        slope = np.nan_to_num((near - at) / step)
        energy = float((slope**2).sum())
        value += float((slope * np.nan_to_num(wanted - at)).sum()) / energy if energy > 0 else 0.0
    is_added = "baseline's {}" in change.sentence
    amount = f"{'+' if value > 0 else '−'} {abs(value):.4g}" if is_added else number(value)
    return change.sentence.format(amount), replace(variant, other_key=change.keys + value * change.more)


def scores_of(held: Tokens, rows: Array, wanted: Array, variant: Variant, noise: float, seen: Array) -> Scores:
    """Return the changes of the scores of ``rows`` that the output determines.

    ``seen`` [rows, n] marks the tokens whose keys may have changed. The others keep their relative weights and count as
    one token with their mean value.
    """
    heads, width = held.query.shape[1], held.value.shape[2]
    reads = variant.reads(heads, held.key.shape[1])
    before = weights_of(held, rows, variant)
    parts: list[tuple[Array, ...]] = []
    for i, row in enumerate(rows):
        keys = np.flatnonzero(before[0, i] > 0)
        asked, rest = keys[seen[i, keys]], keys[~seen[i, keys]]
        if not len(asked) or not 1 < len(asked) + (len(rest) > 0) <= width + (len(rest) > 0):
            continue
        for head in range(heads):
            value, old = held.value[asked, reads[head]], before[head, i, asked]
            token, key = asked, held.key[asked, reads[head]]
            query = np.broadcast_to(variant.scale * held.query[row, head], key.shape)
            share = float(before[head, i, rest].sum())
            if len(rest):
                mean = before[head, i, rest] @ held.value[rest, reads[head]] / max(share, 1e-300)
                value, old, token = np.vstack([value, mean]), np.append(old, share), np.append(asked, -1)
                none = np.zeros((1, key.shape[1]))
                query, key = np.vstack([query, none]), np.vstack([key, none])
            known = _solved(value, wanted[i].reshape(heads, width)[head], noise)
            if known is None:
                continue
            after, error = known
            good = (after > 3.0 * error) & (old > 1e-12)
            if good.sum() < 2 or not (token[good] >= 0).any():
                continue
            off = np.log(after[good] / old[good])
            count = int(good.sum())
            number_of, reader = np.full(count, i * heads + head), np.full(count, i)
            parts.append((query[good], key[good], off, (after / error)[good], number_of, token[good], reader))
    if not parts:
        none, some = np.zeros((0, held.query.shape[2])), np.zeros(0, np.int64)
        return Scores(none, none, np.zeros(0), np.zeros(0), some, some, some)
    while sum(len(part[2]) for part in parts) > MAX_EQUATIONS:
        parts = parts[::2]
    scores = Scores(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    return scores._replace(row=np.unique(scores.row, return_inverse=True)[1])


def _solved(value: Array, given: Array, noise: float) -> tuple[Array, Array] | None:
    """Solve for the weights (summing to 1) that combine ``value`` [k, e] to a head's output ``given`` [e].

    Returns (weights, standard errors), or None if the weights are not determined.
    """
    anchor = value[-1]
    others = value[:-1] - anchor
    inverse = np.linalg.pinv(others.T, rcond=1e-9)
    if np.linalg.matrix_rank(others) < len(others):
        return None
    free = inverse @ (given - anchor)
    size = noise * float(np.sqrt((given**2).mean()))
    each = size * np.sqrt((inverse**2).sum(axis=1))
    last = size * float(np.sqrt((inverse.sum(axis=0) ** 2).sum()))
    return np.append(free, 1.0 - free.sum()), np.maximum(np.append(each, last), 1e-12)


def _fitted_changes(keys: Array, scores: Scores, read: Array) -> Iterator[_Change]:
    """Yield changes of ``keys`` [n, heads, d] found by least squares; ``read`` [n] marks scores of the tokens in
    question."""
    yield from _of_all(keys)
    width = keys.shape[2]
    if not read.any():
        return
    wanted = scores.centred(scores.change[:, None])[:, 0]
    query = np.where(read[:, None], scores.query, 0.0)
    yield from _of_runs(keys, scores, query, wanted)
    if int(read.sum()) < PER_NUMBER * width:
        return
    for what, by in (("scale", scores.key), ("add", np.ones_like(scores.key))):
        fit = _fitted(scores.centred(query * by), wanted)
        if fit is None:
            continue
        columns, numbers = fit
        common = float(np.average(numbers, weights=np.abs(numbers)))
        if np.abs(numbers - common).max() > _MAX_SCATTER * abs(common) + 1e-3:
            continue
        where = channels_text(columns, width)
        if what == "add":
            more = _only(keys, columns, np.ones_like(keys))
            yield _Change(f"are baseline's {{}}{where}", keys, 3, common, more)
        else:
            yield from _scaled(keys, columns, 1.0 + common)
    for name in NARROW:
        sentence, cut = f"are rounded to {dtypes.short(name)}", partial(cast_through, name=name)
        yield from _narrowed(keys, scores, query, wanted, sentence, cut)


def _searched_changes(keys: Array, scores: Scores, read: Array) -> Iterator[_Change]:
    """Yield changes found by the slower searches: clamp limits and moved channels."""
    if not read.any():
        return
    wanted = scores.centred(scores.change[:, None])[:, 0]
    query = np.where(read[:, None], scores.query, 0.0)
    some, y, enough = _few(keys, scores, query, wanted)
    yield from _runs_moved(keys, scores, query, some, y, enough)
    if int(read.sum()) < PER_NUMBER * keys.shape[2]:
        return
    largest = float(np.abs(scores.key[read]).max())
    limits = largest * np.arange(1, _NUM_CLAMP_LIMITS + 1) / (_NUM_CLAMP_LIMITS + 1)
    left = [_residual(scores, query, wanted, _clip(float(limit))) for limit in limits]
    best = int(np.argmin(left))
    near = np.linspace(limits[max(best - 1, 0)], limits[min(best + 1, _NUM_CLAMP_LIMITS - 1)], _NUM_CLAMP_LIMITS)
    limit = float(near[int(np.argmin([_residual(scores, query, wanted, _clip(float(one))) for one in near]))])
    yield from _narrowed(keys, scores, query, wanted, f"are clamped at {limit:.3g}", _clip(limit))
    if keys.shape[2] ** 2 <= MAX_PAIRS:
        yield from _moved(keys, scores, query, wanted)


def _scaled(keys: Array, columns: Array, factor: float) -> Iterator[_Change]:
    where = channels_text(columns, keys.shape[2])
    for whole, sentence in ((0.0, "are zero"), (-1.0, "are negated")):
        if abs(factor - whole) < _MAX_SCATTER:
            yield _Change(sentence + where, with_channels(keys, columns, whole * keys[..., columns]), 1)
    more = _only(keys, columns, keys)
    yield _Change(f"are {{}} × baseline's{where}", with_channels(keys, columns, 0.0), 3, factor, more)


def _few(keys: Array, scores: Scores, query: Array, wanted: Array) -> tuple[Array, Array, float]:
    """Return (indices of some scores, their changes, maximum residual energy of an accepted run of channels)."""
    some = np.arange(len(wanted))[:: -(-len(wanted) // MAX_FEW)]
    y = wanted[some]
    read = np.abs(query[some]).max(axis=1) > 0
    num_independent = min(len(some), keys.shape[1] * keys.shape[2] * len(np.unique(scores.token[some][read])))
    return some, y, float((y**2).sum()) * 2.0 ** (-2.0 * MIN_BITS / max(num_independent, 1))


def _of_runs(keys: Array, scores: Scores, query: Array, wanted: Array) -> Iterator[_Change]:
    """Yield the change of one run of channels (contiguous, or every second, third or fourth), determined from few
    scores."""
    width = keys.shape[2]
    if width > MAX_RUN_WIDTH:
        return
    runs = _runs(width)
    some, y, enough = _few(keys, scores, query, wanted)

    def best(made: Array, is_fitted: bool) -> tuple[int, float] | None:
        """Return (index of the run, its number) if exactly one run explains ``y``; otherwise None."""
        size = np.maximum((made**2).sum(axis=0), 1e-300)
        numbers = (made.T @ y) / size if is_fitted else np.ones(made.shape[1])
        rest = ((y[:, None] - made * numbers) ** 2).sum(axis=0)
        order = np.argsort(rest)
        first = int(order[0])
        if not rest[first] < enough or (len(order) > 1 and rest[order[1]] < MIN_ENERGY_RATIO * rest[first]):
            return None
        return first, float(numbers[first])

    def summed(columns: Array) -> Array:
        return _over_runs(scores.centred(columns)[some], runs)

    if (fit := best(summed(query * scores.key), is_fitted=True)) is not None:
        yield from _scaled(keys, runs[fit[0]], 1.0 + fit[1])
    if (fit := best(summed(query), is_fitted=True)) is not None:
        columns, more = runs[fit[0]], fit[1]
        text = f"are baseline's {{}}{channels_text(columns, width)}"
        yield _Change(text, keys, 3, more, _only(keys, columns, np.ones_like(keys)))
    for name in NARROW:
        cut = partial(cast_through, name=name)
        if (fit := best(summed(query * (cut(scores.key) - scores.key)), is_fitted=False)) is not None:
            columns = runs[fit[0]]
            sentence = f"are rounded to {dtypes.short(name)}{channels_text(columns, width)}"
            yield _Change(sentence, with_channels(keys, columns, cut(keys[..., columns])), 1)
    yield from _runs_moved(keys, scores, query, some, y, enough)


def _runs_moved(keys: Array, scores: Scores, query: Array, some: Array, y: Array, enough: float) -> Iterator[_Change]:
    """Yield runs of channels that hold another run, are swapped with it, or are rotated by one."""
    width = keys.shape[2]
    if width > MAX_PAIRS**0.5:
        return
    runs = _runs(width)
    inside = np.zeros((width, len(runs)))
    for i, run in enumerate(runs):
        inside[run, i] = 1.0
    # by[o][:, c]: contribution of channel c holding channel c + o
    by = [scores.centred(query * (np.roll(scores.key, -o, axis=1) - scores.key))[some] for o in range(width)]
    best: list[tuple[float, Array, Array]] = []
    for o in range(1, width):
        made = by[o] @ inside
        back = np.roll(by[-o % width], -o, axis=1) @ inside
        is_apart = (inside * np.roll(inside, -o, axis=0)).sum(axis=0) == 0
        for is_swap, values in ((False, made), (True, made + back)):
            rest = np.where(is_apart, ((y[:, None] - values) ** 2).sum(axis=0), np.inf)
            for i in np.argsort(rest)[:2]:
                here, there = runs[i], (runs[i] + o) % width
                if is_swap and o > width // 2:
                    continue  # the same swap, seen from its other end
                pair = (np.concatenate([here, there]), np.concatenate([there, here])) if is_swap else (here, there)
                best.append((float(rest[i]), *pair))
    for run in [run for run in runs if len(run) > 2]:
        source = np.roll(run, 1)
        values = by[(run[0] - run[1]) % width][:, run[1:]].sum(axis=1) + by[(run[-1] - run[0]) % width][:, run[0]]
        best.append((float(((y - values) ** 2).sum()), run, source))
    best.sort(key=lambda one: one[0])
    if best and best[0][0] < enough and (len(best) < 2 or best[1][0] >= MIN_ENERGY_RATIO * best[0][0]):
        _, target, source = best[0]
        is_order, text = order_text(target, source)
        yield _Change(f"{'have' if is_order else 'hold'} {text}", with_channels(keys, target, keys[..., source]), 3)


def _runs(width: int) -> list[Array]:
    """Return all runs of channels: contiguous, and every second, third or fourth channel."""
    return [
        start + stride * np.arange(count)
        for stride in (1, 2, 3, 4)
        for start in range(width)
        for count in range(2 if stride > 1 else 1, (width - 1 - start) // stride + 2)
    ]


def _over_runs(columns: Array, runs: list[Array]) -> Array:
    """Return the sums over the columns of each run, as [n, runs]."""
    inside = np.zeros((columns.shape[1], len(runs)))
    for i, run in enumerate(runs):
        inside[run, i] = 1.0
    sums: Array = columns @ inside
    return sums


def _fitted(columns: Array, wanted: Array) -> tuple[Array, Array] | None:
    """Return (columns that explain ``wanted``, their coefficients); None if no columns do."""
    size = np.sqrt((columns**2).sum(axis=0))
    if not size.min() > 0.0:
        return None
    unit = columns / size
    numbers = np.linalg.lstsq(unit, wanted, rcond=1e-10)[0] / size
    rest = wanted - columns @ numbers
    error = float(np.sqrt((rest**2).sum() / max(len(wanted) - len(size), 1)))
    if float((rest**2).sum()) > 0.05 * float((wanted**2).sum()):
        return None
    spread = error * np.sqrt(np.maximum(np.diag(np.linalg.pinv(unit.T @ unit)), 0.0)) / size
    kept = np.flatnonzero(
        (np.abs(numbers) > _MIN_STANDARD_ERRORS * spread) & (np.abs(numbers) > _ZERO_SHARE * np.abs(numbers).max())
    )
    if not len(kept):
        return None
    return kept, np.linalg.lstsq(unit[:, kept], wanted, rcond=None)[0] / size[kept]


def _narrowed(
    keys: Array, scores: Scores, query: Array, wanted: Array, sentence: str, cut: Callable[[Array], Array]
) -> Iterator[_Change]:
    """Yield keys passed through the function ``cut``, in the channels whose fitted coefficient is 1, and in all
    channels."""
    off = cut(scores.key) - scores.key
    some = np.flatnonzero(np.abs(off).max(axis=0) > 0)
    if not len(some):
        return
    columns = scores.centred(query * off)[:, some]
    size = np.sqrt((columns**2).sum(axis=0))
    if not size.min() > 0.0:
        return
    numbers = np.linalg.lstsq(columns / size, wanted, rcond=1e-10)[0] / size
    chosen = some[np.abs(numbers - 1.0) < 0.5]
    if len(chosen):
        where = channels_text(chosen, keys.shape[2])
        yield _Change(sentence + where, with_channels(keys, chosen, cut(keys[..., chosen])), 2)
        yield _Change(sentence, cut(keys), 1)


def _residual(scores: Scores, query: Array, wanted: Array, cut: Callable[[Array], Array]) -> float:
    columns = scores.centred(query * (cut(scores.key) - scores.key))
    numbers = np.linalg.lstsq(columns, wanted, rcond=1e-10)[0]
    return float(((wanted - columns @ numbers) ** 2).sum())


def _clip(limit: float) -> Callable[[Array], Array]:
    return lambda values: np.clip(values, -limit, limit)


def _moved(keys: Array, scores: Scores, query: Array, wanted: Array) -> Iterator[_Change]:
    """Yield channels that hold other channels, found one by one (orthogonal matching pursuit, Tropp 2004)."""
    width = keys.shape[2]
    pairs = [(c, other) for c in range(width) for other in range(width) if other != c]
    columns = np.stack([query[:, c] * (scores.key[:, other] - scores.key[:, c]) for c, other in pairs], axis=1)
    columns = scores.centred(columns)
    size = np.sqrt((columns**2).sum(axis=0))
    unit = columns / np.where(size > 0, size, 1.0)
    chosen: list[int] = []
    rest = wanted
    energy = float((wanted**2).sum())
    while len(chosen) < min(width, len(wanted) // PER_NUMBER) and float((rest**2).sum()) > 1e-6 * energy:
        gains = (unit.T @ rest) ** 2
        taken = {pairs[i][0] for i in chosen}
        gains[[i for i, (c, _) in enumerate(pairs) if c in taken]] = -1.0
        chosen.append(int(np.argmax(gains)))
        numbers = np.linalg.lstsq(columns[:, chosen], wanted, rcond=None)[0]
        rest = wanted - columns[:, chosen] @ numbers
        if len(chosen) > 1 and np.abs(numbers - 1.0).max() < _MAX_SCATTER and float((rest**2).sum()) < 1e-3 * energy:
            break
    kept = [i for i in chosen if size[i] > 0]
    if not kept:
        return
    numbers = np.linalg.lstsq(columns[:, kept], wanted, rcond=None)[0]
    holds = {pairs[i][0]: pairs[i][1] for i, n in zip(kept, numbers, strict=True) if abs(n - 1.0) < 0.2}
    if not holds:
        return
    target = np.array(sorted(holds))
    source = np.array([holds[c] for c in target])
    is_order, text = order_text(target, source)
    yield _Change(f"{'have' if is_order else 'hold'} {text}", with_channels(keys, target, keys[..., source]), 3)


def _only(keys: Array, columns: Array, values: Array) -> Array:
    """Return ``values`` in the given columns and zeros elsewhere."""
    kept = np.zeros_like(keys)
    kept[..., columns] = values[..., columns]
    return kept
