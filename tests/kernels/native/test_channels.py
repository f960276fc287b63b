"""Sums over channels: the C++ library equals numpy for every dtype, and invalid arguments raise descriptive errors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import needs_library

from tapscope.core import dtypes
from tapscope.kernels.native import channel_sums, use_backend
from tapscope.kernels.native.channels import KINDS, MIN_ROWS, NO_CHANNEL, find_channel, find_channel_reference

REAL = [name for name in dtypes.NAMES if name not in dtypes.COMPLEX]


def values_of(name: str, rows: int, width: int, seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).uniform(0, 4, (rows, width))
    return drawn.astype(dtypes.numpy_dtype(name))


@given(st.sampled_from(REAL), st.sampled_from(REAL), st.integers(0, 9), st.integers(1, 700), st.integers(0, 3))
@settings(max_examples=60)
def test_channel_sums_backends_agree(one: str, two: str, rows: int, width: int, first: int) -> None:
    baseline, target = values_of(one, rows + 2, width, 1), values_of(two, rows, width, 2)
    index = np.random.default_rng(rows).permutation(rows + 2)[:rows]
    found = channel_sums(baseline, target, index, first=first)
    with use_backend("numpy"):
        expected = channel_sums(baseline, target, index, first=first)
    assert found.shape == (2, len(KINDS), width)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-9)


@given(st.integers(1, 12), st.integers(0, 12))
def test_channel_sums_are_additive_over_calls(rows: int, cut: int) -> None:
    baseline, target = values_of("float32", rows, 5, 1), values_of("bfloat16", rows, 5, 2)
    cut = min(cut, rows)
    parts = channel_sums(baseline[:cut], target[:cut]) + channel_sums(baseline[cut:], target[cut:], first=cut)
    np.testing.assert_allclose(parts, channel_sums(baseline, target), rtol=1e-12)


def test_channel_sums_match_their_definition() -> None:
    b, d = np.array([[1.0, 2.0], [3.0, -4.0]]), np.array([[0.5, 0.0], [-1.0, 2.0]])
    terms = [b**2, b**4, b * d, (b * d) ** 2, b**3 * d]
    np.testing.assert_array_equal(channel_sums(b, b + d), np.array([[t[0] for t in terms], [t[1] for t in terms]]))


def test_channel_sums_refuse_mismatched_rows() -> None:
    one = np.ones((3, 4))
    with pytest.raises(ValueError, match="one width"):
        channel_sums(one, np.ones((3, 5)))
    with pytest.raises(ValueError, match="rows must pair up"):
        channel_sums(one, one[:2])
    with pytest.raises(IndexError):
        channel_sums(one, one, np.array([0, 3]), np.array([0, 1]))


@needs_library
def test_channel_sums_nonfinite_value_affects_only_its_channel() -> None:
    one = np.ones((4, 3), np.float32)
    one[2, 1] = np.nan
    assert np.isnan(channel_sums(one, one)).any(axis=(0, 1)).tolist() == [False, True, False]


@given(st.integers(MIN_ROWS, 60), st.integers(2, 300), st.integers(0, 2**32), st.sampled_from([0.0, 1e-3, 0.5]))
@settings(max_examples=60)
def test_channel_search_backends_agree(rows: int, width: int, seed: int, gain: float) -> None:
    rng = np.random.default_rng(seed)
    baseline = rng.standard_normal((rows, width)) * rng.choice([0.0, 1.0, 30.0], width)
    target = baseline * (1 + 1e-4 * rng.standard_normal((rows, width)))
    target[:, width // 2] *= 1 + gain
    sums = channel_sums(baseline, target)
    found, expected = find_channel(sums, rows), find_channel_reference(sums)
    assert found.index == expected.index
    np.testing.assert_allclose((found.gain, found.noise), (expected.gain, expected.noise), rtol=1e-9)


def test_channel_search_finds_nothing_in_too_little_data() -> None:
    ones = np.ones((MIN_ROWS, 4))
    assert find_channel(channel_sums(ones, ones * 2), MIN_ROWS - 1) == NO_CHANNEL
    assert find_channel(channel_sums(ones[:, :1], ones[:, :1] * 2), MIN_ROWS) == NO_CHANNEL
    assert find_channel(np.zeros((2, len(KINDS), 4)), MIN_ROWS) == NO_CHANNEL
    assert find_channel(np.full((2, len(KINDS), 4), np.nan), MIN_ROWS) == NO_CHANNEL
