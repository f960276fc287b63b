"""Replicas: values that dims call equal on several ranks must be equal, up to the rounding of their dtype."""

from collections.abc import Iterable

import numpy as np

from tapscope import dtypes
from tapscope.comparator.align import Join
from tapscope.comparator.assemble import Whole
from tapscope.comparator.blocks import blocks
from tapscope.comparator.measure import compare_blocks
from tapscope.comparator.pieces import Piece, leaves

TOLERANCE_EPS = 4.0
"""A replica's row may be off by this many epsilons of its dtype, relative to its size: an all-reduce need not add up
in one order on every rank."""


def check_replicas(wholes: Iterable[Whole]) -> str:
    """One sentence on the first replicas that are not equal, or nothing."""
    for whole in wholes:
        for first, other, axis in whole.replicas:
            error = _distance(whole, first, other)
            if error > TOLERANCE_EPS * dtypes.epsilon(whole.dtype or ""):
                ranks = ", ".join(str(r.key.rank) for piece in (first, other) for r in leaves(piece))
                step = whole.records[0].key.step
                return (
                    f"replicas over {axis} differ in {whole.run.name}: ranks {ranks} at step {step} are apart by "
                    f"{error:.1e} of their size"
                )
    return ""


def _distance(whole: Whole, first: Piece, other: Piece) -> float:
    """Largest row error; inf where shapes or non-finite values differ."""
    if first.shape != other.shape:
        return float("inf")
    if any(r.entry is None for piece in (first, other) for r in leaves(piece)):
        return float("inf")  # unequal hashes are all there is
    axes = (0,) if len(first.shape) > 1 else ()
    rows, _, _ = compare_blocks(blocks(first, whole.run, axes), blocks(other, whole.run, axes), Join(0, 0))
    if rows.nonfinite_mismatch.any():
        return float("inf")
    if not rows.sum_sq_diff.any():
        return 0.0
    scale = np.maximum(rows.sum_sq_baseline, np.median(rows.sum_sq_baseline))
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.nanmax(np.sqrt(rows.sum_sq_diff / scale)))
