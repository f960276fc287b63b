"""Sums of every channel over some rows of two matrices of any dtypes, from which a scale of its own can be told."""

from typing import Any

import numpy as np

from tapscope.kernels.native import library
from tapscope.kernels.native.strips import checked, native_sides

Array = np.ndarray[Any, Any]

KINDS = ("energy", "fourth", "product", "squared", "cubic")
"""With b the baseline's values and d the differences: sums of b^2, b^4, b d, (b d)^2 and b^3 d."""


def channel_sums(
    baseline: Array,
    target: Array,
    baseline_rows: Array | None = None,
    target_rows: Array | None = None,
    *,
    first: int = 0,
) -> Array:
    """[2, 5, width] float64: the sums of :data:`KINDS` over the even and over the odd rows, counted from ``first``.

    Row i of ``baseline`` meets row i of ``target``, or ``baseline_rows[i]`` meets ``target_rows[i]``. The arguments are
    those of :func:`.compare_rows`, and so is what is raised. Values are widened to float64; a non-finite one spoils the
    sums of its channel.
    """
    strip = checked(baseline, target, baseline_rows, target_rows)
    sums = np.zeros((2, len(KINDS), strip.baseline.shape[1]))
    functions = library.functions()
    if functions is None:
        one, two, left, right = strip[:4]
        _add_reference(one if left is None else one[left], two if right is None else two[right], first, sums)
    else:
        functions.channel_sums(*native_sides(strip), first, sums)
    return sums


@np.errstate(over="ignore", under="ignore", invalid="ignore")
def _add_reference(baseline: Array, target: Array, first: int, sums: Array) -> None:
    """The same in numpy: some ten float64 temporaries of the rows' size."""
    b = baseline.astype(np.float64)
    square, change = b * b, b * (target.astype(np.float64) - b)
    for kind, terms in enumerate((square, square * square, change, change * change, square * change)):
        for half in range(2):
            sums[half, kind] += terms[(half + first) % 2 :: 2].sum(axis=0)
