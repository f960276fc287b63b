import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tapscope.core import dtypes
from tapscope.core.observe import RowSpan
from tapscope.render import tensor_summary as digest_module
from tapscope.render.row_labels import RowMap
from tapscope.render.tensor_summary import digest, to_float

FLOATS = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=1, max_dims=4, max_side=7),
    elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
)


def by_rows(array, axes):
    moved = np.moveaxis(array, axes, range(len(axes)))
    return moved.reshape(int(np.prod(moved.shape[: len(axes)])), -1).astype(np.float64)


@settings(max_examples=60)
@given(FLOATS)
def test_histogram_counts_every_finite_value_once_and_ends_at_the_extremes(array):
    found = digest(array).histogram
    finite = array[np.isfinite(array)].astype(np.float64)
    if not finite.size:
        assert found is None
        return
    assert sum(found.counts) == finite.size
    assert (found.low, found.high) == (finite.min(), finite.max())


def test_histogram_agrees_with_numpy_over_many_blocks(monkeypatch):
    monkeypatch.setattr(digest_module, "BLOCK", 1 << 10)
    array = np.random.default_rng(1).standard_normal((300, 40)).astype(np.float32)
    counts, edges = np.histogram(array.astype(np.float64), bins=32)
    found = digest(array).histogram
    # A value on a bin edge may fall to either side, because the edges are rounded differently.
    assert np.abs(np.array(found.counts) - counts).sum() <= 4
    assert [found.edges(i)[0] for i in range(32)] == pytest.approx(edges[:-1])


@settings(max_examples=60)
@given(FLOATS)
def test_strip_keeps_the_largest_finite_magnitude_of_each_row_and_marks_nonfinite_rows(array):
    rows = by_rows(array, (0,))
    strip = digest(array).strip
    expected = np.where(np.isfinite(rows), np.abs(rows), 0).max(axis=1)
    assert list(strip.peaks) == expected.tolist()
    assert list(strip.bad) == (~np.isfinite(rows).all(axis=1)).tolist()


@settings(max_examples=60)
@given(FLOATS)
def test_digest_finds_the_first_nonfinite_value_in_row_order(array):
    wrong = np.argwhere(~np.isfinite(array))
    found = digest(array)
    assert found.first_bad == (tuple(wrong[0].tolist()) if len(wrong) else None)


def test_digest_treats_middle_token_axes_as_rows_and_keeps_tensor_coordinates():
    array = np.ones((2, 3, 4, 5), np.float32)
    array[1, 2, 3, 4] = np.nan
    array[1, 0, 1, 0] = np.inf
    rows = RowMap((0, 2), (2, 4), False, ((0, 8),), (RowSpan("a", 0, 4, 0, 0), RowSpan("b", 0, 4, 0, 4)))
    found = digest(array, rows)
    assert found.first_bad == (1, 0, 1, 0)
    assert found.bad_row == 5
    assert str(rows.place(found.bad_row)) == "request b, position 1"
    assert found.strip.num_rows == 8
    assert [i for i, bad in enumerate(found.strip.bad) if bad] == [5, 7]


@settings(max_examples=30)
@given(st.integers(1, 9000), st.data())
def test_digest_finds_the_first_nonfinite_row_of_long_tensors(num_rows, data):
    bad = data.draw(st.integers(0, num_rows - 1))
    array = np.zeros((num_rows, 3), np.float32)
    array[bad:, 1] = np.inf
    assert digest(array).first_bad == (bad, 1)


@settings(max_examples=40)
@given(st.integers(1, 300), st.integers(1, 300))
def test_strip_keeps_its_largest_value_when_shrunk(num_rows, cells):
    array = np.random.default_rng(num_rows).standard_normal((num_rows, 2))
    strip = digest(array).strip
    small = strip.shrink(cells)
    assert len(small.peaks) == min(cells, num_rows)
    assert max(small.peaks) == max(strip.peaks)


@pytest.mark.parametrize("name", dtypes.NAMES)
def test_digest_supports_every_dtype(name):
    dtype = dtypes.numpy_dtype(name)
    array = np.arange(1, 13).reshape(3, 4).astype(dtype)  # e8m0 has no zero
    found = digest(array)
    assert sum(found.histogram.counts) == 12
    assert list(found.strip.peaks) == np.abs(to_float(array)).max(axis=1).tolist()
    assert found.is_magnitude == (name in dtypes.COMPLEX)


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (4, 0), (1,)])
def test_digest_supports_scalars_and_empty_tensors(shape):
    array = np.ones(shape, np.float32)
    found = digest(array)
    assert (found.histogram is None) == (array.size == 0)
    assert found.first_bad is None


def test_digest_finds_a_scalar_nan():
    found = digest(np.float32("nan").reshape(()))
    assert found.first_bad == ()
    assert found.histogram is None


def test_histogram_bins_survive_the_range_of_float64():
    found = digest(np.array([-1.7e308, 0.0, 1.7e308]))
    assert sum(found.histogram.counts) == 3
    assert np.isfinite(found.histogram.edges(0)).all()


def test_digest_corner_keeps_every_digit_of_integers():
    assert digest(np.array([[2**53 + 1]])).corner.values[0, 0] == 2**53 + 1
