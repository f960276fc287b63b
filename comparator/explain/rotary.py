"""Rotary: queries or keys were turned by other angles, or in other pairs (RoPE, Su et al. 2021, arXiv 2104.09864)."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from tapscope.comparator.explain.damage import Damage
from tapscope.comparator.explain.trial import Trial

Array = np.ndarray[Any, Any]

THETAS = (10000.0, 500000.0, 1000000.0)
"""Bases that are tried beside those the runs name: Llama 1 and 2, Llama 3, Qwen 2 and 3."""
TRIED = 64
"""Numbers that are tried in each round of a search."""
SHIFTS = (1, -1, 2, -2)
"""Positions."""


def turns(damage: Damage, thetas: Sequence[float]) -> Iterator[Trial]:
    """Not turned, turned twice, turned at a shifted position, or with the other layout of pairs."""
    sample = damage.sample
    width = sample.baseline.shape[1]
    if sample.request[0] < 0 or width != sample.width or sample.is_integer:
        return
    for size in [n for n in damage.head_dims if n % 2 == 0 and width % n == 0]:
        heads = sample.baseline[damage.rows].reshape(len(damage.rows), -1, size)
        for theta in dict.fromkeys((*thetas, *THETAS)):
            angle = sample.position[damage.rows][:, None] * theta ** (-np.arange(0, size, 2) / size)[None, :]
            for sentence, values in _ways(heads, angle, theta, size):
                flat = values.reshape(len(values), -1)[:, damage.columns]
                yield Trial("rope", sentence, flat)


def tables(damage: Damage) -> Iterator[Trial]:
    """A table of cosines or sines with another base, or at scaled positions."""
    sample = damage.sample
    width, after = sample.baseline.shape[1], sample.target[damage.rows]
    if sample.is_integer or width != sample.width or width % 2 or not np.abs(np.nan_to_num(after)).max() <= 1.001:
        return
    position = sample.position[damage.rows].astype(np.float64)
    for function in (np.cos, np.sin):
        made = partial(_table, function, position, width)
        plain = partial(made, factor=1.0)
        theta, off = _search(plain, sample.baseline[damage.rows], 1e2, 1e9)
        if not off < 1e-3:
            continue
        other, _ = _search(plain, after, 1e2, 1e9)
        text = f"RoPE with theta {other:.4g} in target against {theta:.4g} in baseline"
        yield Trial("rope theta", text, made(other, 1.0)[:, damage.columns], 1)
        factor, _ = _search(partial(made, theta), after, 1 / 64, 64.0)
        text = f"RoPE at positions {factor:.4g} times those of baseline (theta {theta:.4g})"
        yield Trial("rope scaling", text, made(theta, factor)[:, damage.columns], 1)


def _table(function: Any, position: Array, width: int, theta: float, factor: float) -> Array:
    angle = factor * position[:, None] * theta ** (-np.arange(0, width, 2) / width)[None, :]
    found: Array = np.tile(function(angle), (1, 2))
    return found


def _search(made: Callable[..., Array], wanted: Array, low: float, high: float) -> tuple[float, float]:
    """(the number in low..high whose values are nearest, their mean square distance)."""
    wanted = np.nan_to_num(wanted)
    for _ in range(5):
        tried = np.geomspace(low, high, TRIED)
        off = [float(((made(float(number)) - wanted) ** 2).mean()) for number in tried]
        best = int(np.argmin(off))
        low, high = float(tried[max(best - 1, 0)]), float(tried[min(best + 1, TRIED - 1)])
    return float(tried[best]), off[best]


def _ways(heads: Array, angle: Array, theta: float, size: int) -> Iterator[tuple[str, Array]]:
    base = f"theta {theta:g}, heads of {size}"
    for layout in ("half", "interleaved"):
        other = "interleaved" if layout == "half" else "half"
        plain = _turn(heads, -angle, layout)
        yield f"target is not rotated where baseline is (RoPE, {layout} layout, {base})", plain
        yield f"target is rotated once more than baseline (RoPE, {layout} layout, {base})", _turn(heads, angle, layout)
        yield (
            f"target is rotated in the {other} layout, baseline in the {layout} one (RoPE, {base})",
            _turn(plain, angle, other),
        )
        for shift in SHIFTS:
            moved = shift * theta ** (-np.arange(0, size, 2) / size)[None, :]
            more = "higher" if shift > 0 else "lower"
            text = f"target is rotated as if positions were {abs(shift)} {more} (RoPE, {layout} layout, {base})"
            yield text, _turn(heads, moved, layout)


def _turn(heads: Array, angle: Array, layout: str) -> Array:
    """[rows, heads, size] rotated by [rows or 1, size / 2] angles."""
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
    if layout == "half":
        one, two = np.split(heads, 2, axis=-1)
        return np.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)
    one, two = heads[..., 0::2], heads[..., 1::2]
    found = np.empty_like(heads)
    found[..., 0::2], found[..., 1::2] = one * cos - two * sin, two * cos + one * sin
    return found
