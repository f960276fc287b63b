"""Cached values: the values that attention reads are not the computed ones (scaled, rounded, moved, of some tokens).

Queries and keys determine the attention weights, so that the output is linear in the values. The contribution of the
tokens in question therefore shows how their values changed, channel by channel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.explain.attention import (
    PADDED,
    Sees,
    Tokens,
    Variant,
    at_position,
    attend,
    causal,
    everything,
    weighted,
    weights_of,
)
from tapscope.comparator.explain.casts import cast_through
from tapscope.comparator.explain.column_order import order_text
from tapscope.comparator.explain.region_text import spans
from tapscope.comparator.explain.search import searched
from tapscope.core import dtypes

Array = np.ndarray[Any, Any]

MAX_ADDED = 16
"""Maximum number of steps for which separate offsets are fitted."""
PER_NUMBER = 4
"""Minimum number of values per fitted offset."""
MAX_STEPS = 6
"""Number of leading steps for which "from this step on" is tried."""
NARROW = ("bfloat16", "float16", "float8_e4m3fn")
_MIN_CHANNEL_SHARE = 0.02
"""A channel is affected if its error exceeds this fraction of the largest channel error."""
CLAMPED_TOKEN_SETS = ("", "of the token's own position", "of position 0")
"""Token sets for which a clamp limit is searched."""
MAX_WEIGHTS = 1 << 24
_MIN_NOISE_RATIO = 10.0
"""A row certainly differs if its error exceeds this many times the noise."""

AS_READ = "as attention reads them in target (KV cache)"


class TokenSet(NamedTuple):
    """Tokens whose keys or values may be wrong, depending on the row that reads them."""

    sentence: str
    """Description such as ``of position 0``; empty for all tokens."""
    covers: Sees

    @property
    def suffix(self) -> str:
        """End of a sentence about these tokens: ``, of position 0``."""
        return f", {self.sentence}" if self.sentence else ""


class Change(NamedTuple):
    """A candidate change of some channels."""

    sentence: str
    values: Array
    """[n, heads, channels] changed values."""
    cost: int


class Contribution(NamedTuple):
    """Contribution of the tokens in question to the outputs, with each row divided by its norm."""

    weights: Array
    """[heads, rows, n] attention weights of these tokens."""
    reads: Array
    part: Array
    """[rows, heads, e] contribution of the unchanged values."""
    share: Array
    """[rows, heads, 1] sum of the attention weights of these tokens."""
    rest: Array
    """[rows, heads, e] contribution that the target's output implies."""

    def of(self, values: Array) -> Array:
        """Return the contribution of other values, as [rows, heads, channels]."""
        return weighted(self.weights, values[:, self.reads])


def candidate_token_sets(tokens: Tokens, rows: Array, off: Array) -> Iterator[TokenSet]:
    """Yield sets of tokens, simplest first.

    Sets are: all tokens, the row's own, the first position, the first or last of each step; each for all steps or from
    a later step on. Every row that is ``off`` reads some token of a set. Sets equal to a simpler set are skipped.
    """
    steps = np.unique(tokens.step)[1 : MAX_STEPS + 1].tolist()
    newest = _newest(tokens)
    plain = [
        TokenSet("", everything),
        TokenSet("of the token's own position", _sees_own),
        TokenSet("of position 0", at_position(0)),
        TokenSet("of the first token of each step", _of_step(tokens, 0)),
        TokenSet("of the last token of each step", _of_step(tokens, -1)),
        TokenSet("of each request's last token of each step", newest),
        TokenSet("of the token's own position, in each request's last token of each step", _both(_sees_own, newest)),
    ]
    since = [
        TokenSet(f"{one.sentence} from step {step} on".strip(), _since(one.covers, step))
        for step in steps
        for one in plain
    ]
    known: list[Array] = []
    for one in (*plain, *since):
        seen = seen_by(tokens, rows, one.covers)
        hit: Array = np.asarray(seen.any(axis=1))
        if hit.any() and hit[off].all() and not any(np.array_equal(seen, other) for other in known):
            known.append(seen)
            yield one


def rows_that_differ(error: Array, wanted: Array, noise: float) -> Array:
    """Return whether each row differs beyond doubt, as [rows]."""
    size = np.sqrt((wanted**2).sum(axis=1))
    off = np.sqrt((np.nan_to_num(error) ** 2).sum(axis=1))
    differs: Array = off > max(_MIN_NOISE_RATIO * noise * float(np.median(size)), 0.0)
    return differs


def seen_by(tokens: Tokens, rows: Array, covers: Sees) -> Array:
    """Return which tokens of the set each row reads, as bool [rows, tokens]."""
    keys = np.arange(len(tokens.request))
    same = tokens.request[rows][:, None] == tokens.request[None, :]
    before = tokens.step[None, :] <= tokens.step[rows][:, None]
    is_seen: Array = same & before & causal(tokens, rows, keys) & covers(tokens, rows, keys)
    return is_seen


def _sees_own(tokens: Tokens, rows: Array, keys: Array) -> Array:
    is_own: Array = tokens.position[rows][:, None] == tokens.position[keys][None, :]
    return is_own


def _of_step(tokens: Tokens, place: int) -> Sees:
    real = np.flatnonzero(tokens.position != PADDED)
    return _among([real[tokens.step[real] == step][place] for step in np.unique(tokens.step[real])])


def _newest(tokens: Tokens) -> Sees:
    """Return the set of each request's last token in each step."""
    last: dict[tuple[int, int], int] = {}
    for i in np.flatnonzero(tokens.position != PADDED).tolist():
        place = int(tokens.request[i]), int(tokens.step[i])
        if place not in last or tokens.position[i] > tokens.position[last[place]]:
            last[place] = i
    return _among(list(last.values()))


def _among(chosen: Sequence[int]) -> Sees:
    def covers(tokens: Tokens, rows: Array, keys: Array) -> Array:
        return np.broadcast_to(np.isin(keys, chosen)[None, :], (len(rows), len(keys)))

    return covers


def _both(one: Sees, two: Sees) -> Sees:
    def covers(tokens: Tokens, rows: Array, keys: Array) -> Array:
        covered: Array = one(tokens, rows, keys) & two(tokens, rows, keys)
        return covered

    return covers


def _since(covers: Sees, step: int) -> Sees:
    def late(tokens: Tokens, rows: Array, keys: Array) -> Array:
        covered: Array = covers(tokens, rows, keys) & (tokens.step[keys] >= step)[None, :]
        return covered

    return late


def cached_value_changes(
    tokens: Tokens, rows: Array, wanted: Array, variant: Variant, noise: float
) -> Iterator[tuple[str, Variant, int]]:
    """Yield (sentence, variant, cost) of candidate changes of the values."""
    num, heads, width = len(rows), tokens.query.shape[1], tokens.value.shape[2]
    if num * heads * len(tokens.request) > MAX_WEIGHTS:
        return
    given = attend(tokens, rows, variant).reshape(num, heads, width)
    error = wanted.reshape(num, heads, width) - given
    if not np.isfinite(error).all():
        return
    size = np.sqrt(np.maximum((given**2).sum(axis=2, keepdims=True), 1e-300))
    channels = _damaged(error / size, noise)
    reads = variant.reads(heads, tokens.key.shape[1])
    for span in candidate_token_sets(tokens, rows, rows_that_differ(error.reshape(num, -1), wanted, noise)):
        weights = weights_of(tokens, rows, variant) * seen_by(tokens, rows, span.covers)[None]
        part = weighted(weights, tokens.value[:, reads])
        share = weights.sum(axis=2).T[:, :, None]
        seen = Contribution(weights / size.transpose(1, 0, 2), reads, part / size, share / size, (part + error) / size)
        for change in _changes(tokens.value, seen, channels, is_plain=span.sentence in CLAMPED_TOKEN_SETS):
            columns = "" if "column" in change.sentence else channels_text(channels, width)
            text = f"values {change.sentence}{columns} {AS_READ}{span.suffix}"
            changed = replace(variant, other_value=change.values, where=span.covers)
            yield text, changed, change.cost + (span.covers is not everything)
        for text, changed in _added_by_step(tokens, seen, channels, variant, span):
            yield text, changed, 4 + (span.covers is not everything)


def _damaged(error: Array, noise: float) -> Array:
    """Return the affected channels of a head, judged over all heads and rows."""
    off = np.sqrt((error**2).mean(axis=(0, 1)))
    typical = noise / np.sqrt(error.shape[2])
    damaged = np.flatnonzero(off > max(_MIN_CHANNEL_SHARE * float(off.max(initial=0.0)), 4.0 * typical))
    return damaged if 0 < 2 * len(damaged) <= len(off) else np.arange(len(off))


def _changes(values: Array, seen: Contribution, channels: Array, *, is_plain: bool) -> Iterator[Change]:
    """Yield candidate changes of ``values`` in the given channels."""
    old, new, mine = seen.part[..., channels], seen.rest[..., channels], values[..., channels]
    yield Change("are zero", with_channels(values, channels, 0.0), 1)
    yield Change("are negated", with_channels(values, channels, -mine), 1)
    for name in NARROW:
        yield Change(
            f"are rounded to {dtypes.short(name)}", with_channels(values, channels, cast_through(mine, name)), 1
        )
    energy = float((old**2).sum())
    if energy > 0.0:
        factor = float((old * new).sum()) / energy
        yield Change(f"are {number(factor)} × baseline's", with_channels(values, channels, factor * mine), 2)
    added = np.broadcast_to(seen.share, old.shape)
    energy = float((added**2).sum())
    if energy > 0.0:
        summand = float((added * (new - old)).sum()) / energy
        text = f"are baseline's {'+' if summand > 0 else '−'} {abs(summand):.4g}"
        yield Change(text, with_channels(values, channels, mine + summand), 2)
    source = _sources(seen.part, new)
    if (source != channels).any():
        moved = source != channels
        is_plain_order, text = order_text(channels[moved], source[moved])
        verb = "have" if is_plain_order else "hold"
        yield Change(f"{verb} {text}", with_channels(values, channels, values[..., source]), 2)
    if is_plain and mine.any():
        largest = float(np.abs(mine).max())

        def off(limit: float) -> float:
            return float(((seen.of(np.clip(mine, -limit, limit)) - new) ** 2).sum())

        limit, _ = searched(off, 0.01 * largest, largest)
        yield Change(f"are clamped at {limit:.4g}", with_channels(values, channels, np.clip(mine, -limit, limit)), 2)


def channels_text(channels: Array, width: int) -> str:
    """Return text such as `` in columns 0–3 of each head``; empty if all channels of heads of this ``width`` are
    affected."""
    return "" if len(channels) == width else f" in {spans('column', channels)} of each head"


def number(factor: float) -> str:
    """Return the factor with four digits, or with as many as distinguish it from 1."""
    off = factor - 1.0
    return f"{factor:.4g}" if abs(off) > 0.01 or not off else f"(1 {'+' if off > 0 else '-'} {abs(off):.2g})"


def _added_by_step(
    tokens: Tokens, seen: Contribution, channels: Array, variant: Variant, span: TokenSet
) -> Iterator[tuple[str, Variant]]:
    """Yield separate offsets per step, which fits an offset that depends on the input of the call."""
    steps = np.unique(tokens.step[seen.weights.any(axis=(0, 1))])
    extra = (seen.rest - seen.part)[..., channels]
    if not 1 < len(steps) <= MAX_ADDED or extra.size < PER_NUMBER * len(steps):
        return
    shares = np.stack([seen.weights[..., tokens.step == step].sum(axis=2).T for step in steps], axis=2)
    numbers = np.linalg.lstsq(shares.reshape(-1, len(steps)), extra.mean(axis=2).ravel(), rcond=None)[0]
    if len(set(np.sign(numbers).tolist())) != 1:
        return
    added = np.zeros(len(tokens.step))
    for step, number_of in zip(steps, numbers, strict=True):
        added[tokens.step == step] = number_of
    values = with_channels(tokens.value, channels, tokens.value[..., channels] + added[:, None, None])
    low, high = sorted(np.abs(numbers).tolist())[:: len(numbers) - 1]
    sign = "+" if numbers[0] > 0 else "−"
    columns = channels_text(channels, tokens.value.shape[2])
    text = f"values are baseline's {sign} {low:.4g} to {high:.4g}, by step,{columns} {AS_READ}{span.suffix}"
    yield text, replace(variant, other_value=values, where=span.covers)


def with_channels(values: Array, channels: Array, new: Any) -> Array:
    """Return a copy of ``values`` [n, heads, width] with ``new`` in the given channels of every head."""
    changed = values.copy()
    changed[..., channels] = new
    return changed


def _sources(part: Array, new: Array) -> Array:
    """Return for each channel of ``new`` the nearest channel of ``part``, as [channels]."""
    one, two = (x.reshape(-1, x.shape[2]) for x in (part, new))
    distance = (one**2).sum(axis=0)[None, :] - 2.0 * (two.T @ one)
    nearest: Array = distance.argmin(axis=1)
    return nearest
