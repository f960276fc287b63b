"""Aggregation of compared rows: the C++ library equals numpy for arbitrary rows."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from tapscope.kernels.native import RowMeasures, compare_rows, overview, overviews
from tapscope.kernels.native.aggregate import median, overview_reference, quantiles

ODD = (0.0, 1.0, np.nan, np.inf, -np.inf, 1e300, 1e-300)


def same(one: Any, two: Any) -> None:
    """Check that indices and counts are equal, and that sums and derived values match approximately."""
    for name in one.__struct_fields__:
        left, right = getattr(one, name), getattr(two, name)
        if isinstance(left, Struct):
            same(left, right)
        elif isinstance(left, bool | int):
            assert left == right, name
        else:
            np.testing.assert_allclose(left, right, rtol=1e-12, err_msg=name)


@given(st.integers(0, 2**32 - 1), st.integers(1, 90), st.integers(0, 5), st.lists(st.sampled_from(ODD), max_size=6))
@settings(max_examples=100)
@np.errstate(all="ignore")
def test_aggregate_backends_agree(seed: int, rows: int, width: int, odd: list[float]) -> None:
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((rows, width))
    b = a + 1e-3 * rng.standard_normal(a.shape) * rng.integers(0, 2, a.shape)
    a[rng.random(rows) < rng.choice((0.0, 0.6, 1.0))] = 0.0
    for value in odd if width else ():
        (a if rng.random() < 0.5 else b)[rng.integers(rows), rng.integers(width)] = value
    found = compare_rows(a, b)
    at_worst = a[np.arange(rows), found.argmax] if width else np.zeros(rows)
    at_worst = np.where(found.argmax >= 0, at_worst, 0.0)
    same(overview(found, at_worst), overview_reference(found, at_worst))


@given(st.lists(st.sampled_from((*ODD, 0.5, 2.0)), min_size=12, max_size=12), st.integers(1, 4))
@settings(max_examples=100)
@np.errstate(all="ignore")
def test_aggregate_backends_agree_on_overflowed_sums(values: list[float], rows: int) -> None:
    floats = np.abs(np.resize(np.array(values), (6, rows)))
    integers = np.ones((8, rows), np.int64)
    measures = RowMeasures(floats, integers)
    one, two = overview(measures, floats[0]), overview_reference(measures, floats[0])
    assert one.worst == two.worst
    np.testing.assert_allclose(one.errors, two.errors, rtol=1e-12)
    np.testing.assert_allclose(one.quantiles, two.quantiles, rtol=1e-12)
    for name in ("element", "gain", "gain_sd", "peak"):
        np.testing.assert_allclose(getattr(one, name), getattr(two, name), rtol=1e-12, err_msg=name)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=40))
def test_aggregate_median_is_numpys_and_quantiles_are_elements(values: list[float]) -> None:
    array = np.array(values)
    np.testing.assert_allclose(median(array), np.median(array), rtol=1e-12, atol=1e-300)
    low, high = quantiles(array, (0.0, 1.0))
    assert (low, high) == (min(values), max(values))
    assert quantiles(array, (0.3,))[0] in values


def test_aggregate_equal_rows_have_no_spread() -> None:
    a = np.ones((3, 4))
    seen = overview(compare_rows(a, a), np.ones(3))
    assert seen.is_zero
    assert seen.num_unequal == 0
    assert seen.quantiles == (0.0, 0.0, 0.0, 0.0)
    assert seen.total.equal == seen.total.count == 12


@pytest.mark.parametrize("width", [2, 9])
def test_aggregate_rows_of_zeros_have_no_size(width: int) -> None:
    """As after a ReLU: three of five rows are zero, and in the target one of these rows has a small value."""
    a = np.zeros((5, width))
    a[0, :2], a[2, 1] = (3.0, 4.0), 10.0
    b = a.copy()
    b[1, 0] = 0.03
    found, at_worst = compare_rows(a, b), np.zeros(5)
    least = 0.25 * 7.5
    for seen in (overview(found, at_worst), overview_reference(found, at_worst)):
        np.testing.assert_allclose(seen.errors, [0.0, 0.03 / least, 0.0, 0.0, 0.0])
        assert seen.peak == pytest.approx(0.03 / (least / np.sqrt(width)))
        assert seen.worst == 1
    nothing = compare_rows(np.zeros((3, width)), a[::2])
    for seen in (overview(nothing, at_worst[:3]), overview_reference(nothing, at_worst[:3])):
        np.testing.assert_array_equal(seen.errors, [np.inf, np.inf, 0.0])


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_aggregate_sections_are_independent(seed: int, lengths: list[int]) -> None:
    rng = np.random.default_rng(seed)
    bounds = [0, *np.cumsum(lengths).tolist()]
    a = rng.standard_normal((bounds[-1], 5))
    found = compare_rows(a, a + 0.1 * rng.integers(0, 2, a.shape))
    at_worst = rng.standard_normal(len(a))
    seen = overviews(found, at_worst, bounds)
    for one, first, stop in zip(seen, bounds, bounds[1:], strict=False):
        same(one, overview_reference(found[first:stop], at_worst[first:stop]))
