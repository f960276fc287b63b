"""RoPE: queries or keys are rotated by other angles, or in other channel pairs (Su et al. 2021, arXiv 2104.09864)."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tapscope.comparator.explain.attention import inverse_frequencies, rotate
from tapscope.comparator.explain.error_region import ErrorRegion
from tapscope.comparator.explain.hypothesis_test import Hypothesis

Array = np.ndarray[Any, Any]

THETAS = (10000.0, 500000.0, 1000000.0)
"""RoPE bases tried in addition to the runs' own: Llama 1 and 2, Llama 3, Qwen 2 and 3."""
SHIFTS = (1, -1, 2, -2)
"""Position shifts that are tried."""


def rope_rotations(region: ErrorRegion, thetas: Sequence[float]) -> Iterator[Hypothesis]:
    """Yield targets that are not rotated, rotated twice, rotated at a shifted position, or with the other pair
    layout."""
    sample = region.sample
    width = sample.baseline.shape[1]
    if sample.request[0] < 0 or width != sample.width or sample.is_integer:
        return
    for size in [n for n in region.head_dims if n % 2 == 0 and width % n == 0]:
        heads = sample.baseline[region.rows].reshape(len(region.rows), -1, size)
        for theta in dict.fromkeys((*thetas, *THETAS)):
            angle = sample.position[region.rows][:, None] * inverse_frequencies(theta, size // 2)[None, :]
            for sentence, values in _variants(heads, angle, theta, size):
                flat = values.reshape(len(values), -1)[:, region.columns]
                yield Hypothesis("rope", sentence, flat)


def _variants(heads: Array, angle: Array, theta: float, size: int) -> Iterator[tuple[str, Array]]:
    base = f"theta {theta:g}, heads of {size}"
    for layout in ("half", "interleaved"):
        other = "interleaved" if layout == "half" else "half"
        plain = _rotated(heads, -angle, layout)
        yield f"target is not rotated where baseline is (RoPE, {layout} layout, {base})", plain
        yield (
            f"target is rotated once more than baseline (RoPE, {layout} layout, {base})",
            _rotated(heads, angle, layout),
        )
        yield (
            f"target is rotated in the {other} layout, baseline in the {layout} one (RoPE, {base})",
            _rotated(plain, angle, other),
        )
        for shift in SHIFTS:
            moved = shift * inverse_frequencies(theta, size // 2)[None, :]
            more = "higher" if shift > 0 else "lower"
            text = f"target is rotated as if positions were {abs(shift)} {more} (RoPE, {layout} layout, {base})"
            yield text, _rotated(heads, moved, layout)


def _rotated(heads: Array, angle: Array, layout: str) -> Array:
    """Return ``heads`` [rows, heads, size] rotated by ``angle`` [rows or 1, size / 2]."""
    return rotate(heads, np.cos(angle)[:, None, :], np.sin(angle)[:, None, :], layout)
