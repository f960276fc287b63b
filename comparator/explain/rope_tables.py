"""RoPE tables: explain how frequencies or positions of a table of cosines, sines or angles differ."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.explain.attention import inverse_frequencies
from tapscope.comparator.explain.attention_variants import USUAL_THETAS
from tapscope.comparator.explain.casts import cast_through
from tapscope.comparator.explain.error_region import ErrorRegion, find_error_region
from tapscope.comparator.explain.predictions import Prediction, select_prediction
from tapscope.comparator.explain.recorded_attention import SiteReader
from tapscope.comparator.explain.region_text import describe, spans
from tapscope.comparator.explain.search import searched
from tapscope.comparator.explain.token_slots import rows_like
from tapscope.comparator.verdict.explanation import Explanation
from tapscope.core import dtypes
from tapscope.core.formatting import plural

Array = np.ndarray[Any, Any]

SHIFTS = (1, -1, 2, -2, 3, -3)
"""Position shifts that are tried."""
_ANGLE_RTOL = 2.0**-22
"""Relative error of an angle that float32 computes from a position and a rounded frequency."""
_FREQUENCY_RTOL = 2e-3
"""Relative difference beyond which a frequency counts as changed."""
_MIN_ROWS = 4
_MAX_FACTOR = 8.0
"""Factors of the positions are tried from 1 / this value to this value."""
_NUM_FACTORS = 161
_MIN_ANGLE = 0.2
"""Angle in radians beyond which a pair determines a factor."""
_MAX_ANGLE = 1.5
"""Angle per position, in radians, beyond which a single pair is ambiguous: the cosine does not show the sign."""
_AT_SCALED_POSITIONS = "RoPE at positions"
_NOT_ROTATED = "all angles are zero in target's table: nothing is rotated"
_HOLDS_IN_COLUMN = 3.0
"""Maximum accepted rms deviation of a column, in units of the noise."""
_MAX_NOISE_RATIO = 8.0
"""Maximum accepted deviation of a table, in units of the noise."""


class _TableFunction(NamedTuple):
    """A function of angles stored in a table, and its inverse."""

    make: Callable[[Array], Array]
    angle: Callable[[Array, Array], Array]
    """([..., width] values, [..., width / 2] approximate angles) -> the nearest angles that give these values."""
    is_pair: bool = False
    """Whether the second half of the columns holds a different function from the first."""

    def table(self, position: Array, frequencies: Array) -> Array:
        """Return the table [rows, width] for these positions; ``frequencies`` are the angles per position of each
        pair."""
        return self.make(position[:, None] * np.tile(frequencies, 2)[None, :])

    def columns(self, pairs: Array, size: int) -> Array:
        """Return the columns that hold the given ``pairs`` of ``size`` pairs, once per function."""
        return np.concatenate((pairs, size + pairs)) if self.is_pair else pairs

    def scale(self, *tables: Array) -> Array | float:
        """Return the reference magnitude of rounding as [columns]: sines of slow pairs are small, cosines are near
        1."""
        if not self.is_pair:
            return 1.0
        size: Array = np.sqrt(np.max([(table**2).mean(axis=0) for table in tables], axis=0))
        return size


def _cosine(values: Array, about: Array) -> Array:
    known = np.arccos(np.clip(_first(values), -1.0, 1.0))
    return _nearest(about, (known, -known))


def _sine(values: Array, about: Array) -> Array:
    known = np.arcsin(np.clip(_first(values), -1.0, 1.0))
    return _nearest(about, (known, np.pi - known))


def _first(values: Array) -> Array:
    first: Array = np.split(values, 2, axis=-1)[0]
    return first


def _both(angle: Array) -> Array:
    one, two = np.split(angle, 2, axis=-1)
    return np.concatenate((np.cos(one), np.sin(two)), axis=-1)


def _angle_of_both(values: Array, about: Array) -> Array:
    cosine, sine = np.split(values, 2, axis=-1)
    known = np.arctan2(sine, cosine)
    return _nearest(about, (known, known))


def _nearest(about: Array, known: Sequence[Array]) -> Array:
    turns = [one + 2 * np.pi * np.round((about - one) / (2 * np.pi)) for one in known]
    return np.where(np.abs(turns[0] - about) <= np.abs(turns[1] - about), turns[0], turns[1])


_TABLE_FUNCTIONS = (
    _TableFunction(np.cos, _cosine),
    _TableFunction(np.sin, _sine),
    _TableFunction(lambda angle: angle, lambda values, about: _first(values)),
)
_COSINES_AND_SINES = _TableFunction(_both, _angle_of_both, is_pair=True)
_OTHER_PORT = {
    "out[0]": "out[1]",
    "out[1]": "out[0]",
    "in[position_embeddings.0]": "in[position_embeddings.1]",
    "in[position_embeddings.1]": "in[position_embeddings.0]",
}
"""Port of a table -> port of its counterpart; cosines come first."""


def explain_rope(
    region: ErrorRegion, sites: SiteReader, thetas: Sequence[float], requests: Sequence[str], padded: frozenset[int]
) -> Explanation | None:
    """Return the explanation of a cosine table together with its sine table, if both were recorded, or of a single
    table.

    See :func:`explain_rope_table`. Cosines of slow pairs are 1 up to rounding, so that only their sines show an error.
    """
    tables = _with_other_table(region, sites)
    explained = None if tables is None else _explained(tables, (_COSINES_AND_SINES,), thetas, requests, padded)
    return explained or explain_rope_table(region, thetas, requests, padded)


def _with_other_table(region: ErrorRegion, sites: SiteReader) -> ErrorRegion | None:
    """Return a region with the first halves of cosines and sines side by side; None unless the second halves are
    copies."""
    sample = region.sample
    path, _, port = sample.site.rpartition(":")
    width = sample.baseline.shape[1]
    if port not in _OTHER_PORT or sample.is_integer or width != sample.width or width % 2:
        return None
    given = sites.slots(f"{path}:{_OTHER_PORT[port]}")
    others = [rows_like(side, sample) for side in given or ()]
    if len(others) != 2 or any(other is None or other.shape[1] != width for other in others):
        return None
    halves_of_sides = []
    for own, other in zip((sample.baseline, sample.target), others, strict=True):
        tables = (own, other) if port < _OTHER_PORT[port] else (other, own)
        halves = [np.split(table, 2, axis=1) for table in tables if table is not None]
        if not all(np.array_equal(first, second) for first, second in halves):
            return None
        halves_of_sides.append(np.hstack([first for first, _ in halves]))
    both = find_error_region(
        replace(sample, baseline=halves_of_sides[0], target=halves_of_sides[1]), 0.0, region.sizes, region.head_dims
    )
    return None if both is None else replace(both, noise=region.noise)


def explain_rope_table(
    region: ErrorRegion, thetas: Sequence[float], requests: Sequence[str], padded: frozenset[int]
) -> Explanation | None:
    """Return the explanation of a table; None if the baseline is not a RoPE table, or no cause fits."""
    kinds = _TABLE_FUNCTIONS if "rot" in region.sample.site else _TABLE_FUNCTIONS[:2]
    return _explained(region, kinds, thetas, requests, padded)


def _explained(
    region: ErrorRegion,
    kinds: Sequence[_TableFunction],
    thetas: Sequence[float],
    requests: Sequence[str],
    padded: frozenset[int],
) -> Explanation | None:
    sample = region.sample
    width = sample.baseline.shape[1]
    if sample.is_integer or width != sample.width or width % 2 or sample.position.max(initial=0) < _MIN_ROWS:
        return None
    position = sample.position.astype(np.float64)
    angle = _ANGLE_RTOL * float(position.max())
    noise = float(np.hypot(region.noise, angle))
    noises = [float(np.hypot(max(0.4 * dtypes.epsilon(name), 4e-6), angle)) for name in sample.dtypes]
    for kind in kinds:
        own = frequencies(kind, sample.baseline, position)
        if own is None or not _fits(kind, own, position, sample.baseline, noises[0]):
            continue
        other = frequencies(kind, sample.target, position, region.rows)
        values = sample.baseline, sample.target
        bases = [_theta(kind, *side, position, thetas) for side in zip(values, noises, strict=True)]
        candidates = list(_guesses(kind, region, own, other, bases, position))
        made = {text: kind.table(at, turn) for _, text, at, turn, _ in candidates}
        level = _HOLDS_IN_COLUMN * max(noise, *noises)
        made_of_own = kind.table(position, own)
        predictions = [
            Prediction(name, text, region.cut(made[text]), cost)
            for name, text, _, _, cost in candidates
            if _holds_elsewhere(region, kind, made[text], made_of_own, level)
        ]
        selected = select_prediction(region, predictions, noise)
        if selected is not None:
            whole = replace(region, columns=np.arange(width))
            off = np.abs(made[selected.sentence] - sample.target).max(axis=1)
            extent = "" if off.max() <= _MAX_NOISE_RATIO * max(noise, *noises) else describe(whole, requests, padded)
            sentence = selected.sentence
            if sentence.startswith(_AT_SCALED_POSITIONS) or sentence == _NOT_ROTATED:
                shown = _shown_pairs(region, kind, made[sentence], made_of_own, max(noise, *noises))
                pairs = f"{spans('pair', shown)} of {width // 2}" if 0 < len(shown) < width // 2 else ""
                if pairs and sentence == _NOT_ROTATED:
                    sentence = f"the angles of {pairs} are zero in target's table: these are not rotated"
                elif pairs:
                    sentence += f", as {pairs} show"
            return Explanation(selected.name, sentence, selected.share, extent, num_rows=len(sample.baseline))
    return None


def _holds_elsewhere(region: ErrorRegion, kind: _TableFunction, made: Array, unchanged: Array, noise: float) -> bool:
    """Return whether a cause of the whole table also fits the unaffected columns and predicts no change that is
    absent."""
    sample = region.sample
    level = noise * np.broadcast_to(kind.scale(made[region.rows], unchanged[region.rows]), made.shape[1])

    def size(values: Array) -> Array:
        rms: Array = np.sqrt((values[region.rows] ** 2).mean(axis=0))
        return rms

    expected, differs = size(made - unchanged), size(sample.target - sample.baseline)
    is_absent = (expected > 2.0 * level / _HOLDS_IN_COLUMN) & (differs < 0.5 * expected)
    rest = np.setdiff1d(np.arange(made.shape[1]), region.columns)
    return bool((size(made - sample.target) <= level)[rest].all()) and not is_absent.any()


def _shown_pairs(region: ErrorRegion, kind: _TableFunction, made: Array, unchanged: Array, noise: float) -> Array:
    """Return the indices of pairs that show a cause common to all pairs; slower pairs may rotate too little to show
    it."""
    half = made.shape[1] // 2
    differs = np.sqrt(((made - unchanged)[region.rows] ** 2).mean(axis=0))
    shown = differs > 2.0 * noise * kind.scale(made[region.rows], unchanged[region.rows])
    return np.flatnonzero(shown[:half] | shown[half:])


def frequencies(
    kind: _TableFunction, values: Array, position: Array, rows: Array | slice = slice(None)
) -> Array | None:
    """Return the angle per position (at most 1) of each pair, as [width / 2]; None without a row of position 1.

    Starts from the angle at position 1, then uses positions 2, 4 and so on; each resolves the ambiguity of the next.
    With cosines and sines, the angles of ``rows`` are then fitted.
    """
    if not np.isfinite(values).all() or (kind is not _TABLE_FUNCTIONS[2] and np.abs(values).max() > 1.001):
        return None
    half, rates, step = values.shape[1] // 2, None, 1
    while (at := np.flatnonzero(position == step)).size:
        row = values[at[0]]
        about = rates * step if rates is not None else np.full(half, 0.5)
        angle = kind.angle(row, about)
        rates = np.abs(angle) / step
        step *= 2
    largest = int(position.argmax())
    if rates is None:
        return None
    turns: Array = np.abs(kind.angle(values[largest], rates * position[largest])) / position[largest]
    if kind.is_pair:  # angles are known equally well in every row: least squares
        angle = kind.angle(values[rows], turns[None, :] * position[rows][:, None])
        turns = np.abs(position[rows] @ angle) / float(position[rows] @ position[rows])
    return turns


def _fits(kind: _TableFunction, own: Array, position: Array, values: Array, noise: float) -> bool:
    made = kind.table(position, own)
    off = float(((made - values) ** 2).sum()) / max(float((values**2).sum()), 1e-300)
    return bool(off**0.5 < 4 * noise)


def _guesses(
    kind: _TableFunction,
    region: ErrorRegion,
    own: Array,
    other: Array | None,
    bases: Sequence[float | None],
    position: Array,
) -> Iterator[tuple[str, str, Array, Array, int]]:
    """Yield candidates as (family, sentence, positions, frequencies, cost)."""
    base, new = bases
    yield "rope frequencies", _NOT_ROTATED, 0.0 * position, own, 0
    for name in ("bfloat16", "float16"):
        rounded = f"are rounded to {dtypes.short(name)} in target's table"
        yield "rope positions", f"positions {rounded}", cast_through(position, name), own, 0
        yield "rope frequencies", f"inverse frequencies {rounded}", position, cast_through(own, name), 0
    for shift in SHIFTS:
        more = f"{abs(shift)} {'higher' if shift > 0 else 'lower'}"
        yield "rope shift", f"positions are {more} in target's table", position + shift, own, 1
    if base is not None and new is not None:
        text = f"RoPE with theta {_format_theta(new)} in target against {_format_theta(base)} in baseline"
        yield "rope theta", text, position, inverse_frequencies(new, len(own)), 2
    elif new is not None:
        text = f"RoPE's scaling is missing in target: its frequencies are those of theta {_format_theta(new)}"
        yield "rope scaling", f"{text}, baseline's are scaled", position, inverse_frequencies(new, len(own)), 2
    elif base is not None and other is not None and len(np.unique(region.columns % len(own))) == len(own):
        text = f"RoPE's frequencies differ in target, baseline's are those of theta {_format_theta(base)} (scaling, …)"
        yield "rope scaling", text, position, other, 4
    exact = own if base is None else inverse_frequencies(base, len(own))
    if (factor := _factor(kind, region, exact, position)) is not None:
        of = f" (theta {_format_theta(base)})" if base is not None else ""
        text = f"{_AT_SCALED_POSITIONS} {factor:.4g} times those of baseline{of}"
        yield "rope scaling", text, factor * position, exact, 2
    if other is None:
        return
    changed = np.unique(region.columns % len(own))
    if len(changed) == len(own):
        changed = np.flatnonzero(np.abs(other / np.maximum(own, 1e-300) - 1.0) > _FREQUENCY_RTOL)
    if 0 < len(changed) < len(own):
        mixed = own.copy()
        mixed[changed] = other[changed]
        pairs = ", ".join(map(str, changed[:4])) + (", …" if len(changed) > 4 else "")
        factors = other[changed] / np.maximum(own[changed], 1e-300)
        is_determined = own[changed].min() > 0.0 and (len(changed) > 1 or other[changed].max() < _MAX_ANGLE)
        times = (
            f"{factors[0]:.4g} × baseline's"
            if is_determined and np.ptp(factors) < max(_FREQUENCY_RTOL, region.noise) * factors[0]
            else "different from baseline's"
        )
        text = f"RoPE's frequencies of {plural(len(changed), 'pair')} ({pairs}) are {times} in target"
        yield "rope frequencies", text, position, mixed, 3


def _factor(kind: _TableFunction, region: ErrorRegion, own: Array, position: Array) -> float | None:
    """Return the factor of all positions, estimated from the affected rows.

    Starts with the slowest pairs, whose angles are unambiguous, and adds faster pairs near the previous estimate.
    """
    rows = region.rows[position[region.rows] > 0]
    if not len(rows):
        return None
    size, at = len(own), position[rows][:, None]
    values = region.sample.target[rows]
    order = np.argsort(own)
    order = order[
        np.minimum(np.searchsorted(own[order] * at.max(), _MIN_ANGLE), size - 1) :
    ]  # slower pairs do not determine the factor
    best, low, high = 0.0, 1.0 / _MAX_FACTOR, _MAX_FACTOR

    def off(factor: float, pairs: Array) -> float:
        columns = kind.columns(pairs, size)
        made = kind.make(factor * at * own[columns % size][None, :])
        return float(((made - values[:, columns]) ** 2).sum())

    for count in dict.fromkeys((max(len(order) // 4, 1), max(len(order) // 2, 1), len(order))):
        tried = np.geomspace(low, high, _NUM_FACTORS).tolist()
        best = min(tried, key=lambda factor: off(factor, order[:count]))
        low, high = best * (low / high) ** (4.0 / _NUM_FACTORS), best * (high / low) ** (4.0 / _NUM_FACTORS)
    return searched(lambda factor: off(factor, np.arange(size)), low, high)[0]


def _theta(kind: _TableFunction, values: Array, noise: float, position: Array, thetas: Sequence[float]) -> float | None:
    """Return the RoPE base of a table, preferring a usual base that fits; None if no base fits."""
    size = values.shape[1] // 2

    def off(theta: float) -> float:
        made = kind.table(position, inverse_frequencies(theta, size))
        return float(np.sqrt(((made - values) ** 2).sum() / max(float((values**2).sum()), 1e-300)))

    usual = [theta for theta in dict.fromkeys((*thetas, *USUAL_THETAS)) if off(theta) < 4 * noise]
    if usual:
        return min(usual, key=off)
    best, error = searched(off, 1e2, 1e9)
    return best if error < 4 * noise else None


def _format_theta(theta: float) -> str:
    return f"{theta:.4g}"
