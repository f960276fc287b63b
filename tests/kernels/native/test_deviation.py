"""Deviation of two sides in a few numbers: one native call equals numpy for arbitrary rows."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapscope.core import dtypes
from tapscope.kernels.native import Deviation, Strip, compare_rows, compare_strips, deviation, use_backend
from tapscope.kernels.native.deviation import deviation_reference

ODD = (0.0, 1.0, np.nan, np.inf, -np.inf, 1e30, 1e-30)
PAIRS = [
    ("float32", "bfloat16"),
    ("bfloat16", "bfloat16"),
    ("float64", "float32"),
    ("int64", "int32"),
    ("bool", "bool"),
]


def same(one: Deviation, two: Deviation) -> None:
    np.testing.assert_allclose(one, two, rtol=3e-6, atol=1e-300)  # sums of squares are accumulated in float32 blocks


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 90),
    st.integers(0, 40),
    st.sampled_from(PAIRS),
    st.lists(st.sampled_from(ODD), max_size=6),
    st.sampled_from((None, 0.0, 0.25, 1.0)),
    st.booleans(),
)
@settings(max_examples=100)
@np.errstate(all="ignore")
def test_deviation_is_that_of_the_rows(
    seed: int, rows: int, width: int, pair: tuple[str, str], odd: list[float], share: float | None, gathers: bool
) -> None:
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((rows, width))
    b = a + 1e-2 * rng.standard_normal(a.shape) * rng.integers(0, 2, a.shape)
    for value in odd if width else ():
        (a if rng.random() < 0.5 else b)[rng.integers(rows), rng.integers(width)] = value
    one, two = (side.astype(dtypes.numpy_dtype(name)) for side, name in zip((a, b), pair, strict=True))
    index: list[Any] = [rng.integers(0, rows, 7) for _ in range(2)] if gathers else [None, None]
    strip = Strip(one, two, *index)
    # An error close to the quantile may fall on either side of it, because float sums differ slightly from numpy's.
    with use_backend("numpy"):
        rows_found = compare_strips([strip], strip.num_rows).rows
    exact = compare_strips([strip], strip.num_rows).rows
    np.testing.assert_array_equal(rows_found.integers, exact.integers)
    same(deviation([strip], strip.num_rows, share), deviation_reference(exact, share))


def test_deviation_of_several_blocks_of_rows_is_that_of_all() -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((12, 5))
    b = a + 0.1 * rng.standard_normal(a.shape)
    strips = [Strip(a[:5], b[:5]), Strip(a[5:], b[5:], row=5)]
    same(deviation(strips, 12), deviation_reference(compare_rows(a, b)))
    with use_backend("numpy"):
        same(deviation(strips, 12, 0.25), deviation_reference(compare_rows(a, b), 0.25))
    assert deviation([], 0) == deviation_reference(compare_rows(a[:0], b[:0])) == (0.0,) * 4 + (0,) * 4


def test_deviation_needs_strips_that_fill_the_rows() -> None:
    a = np.ones((3, 2))
    with pytest.raises(ValueError, match="do not fill 4 rows"):
        deviation([Strip(a, a)], 4)
    with pytest.raises(ValueError, match="do not fill 2 rows"):
        deviation([Strip(a, a)], 2)
