"""Sketches: the C++ kernel against its reference, linearity over shards and rows, and the interval of the estimate."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from native_helpers import needs_library

from tapscope.core import dtypes
from tapscope.core.observe import RowSpan, StepInfo
from tapscope.kernels.native.sketch import can_sketch, hashed, sketch_of, sketch_reference
from tapscope.run_format.sketch import (
    HIGH_FACTOR,
    LOW_FACTOR,
    SketchIndex,
    estimate,
    row_key,
    row_keys,
    sketch_index,
)

INFO = StepInfo(step=0, grid=(2, 9), rows=(RowSpan("a", 0, 9, 0, 0), RowSpan("b", 3, 7, 0, 10)))


def test_hash_is_the_documented_one() -> None:
    assert row_key("a", np.arange(3)).tolist() == [1631285038, 3060868471, 1282811188]
    places, signs = hashed(np.array([1, 1, 7], np.uint32), np.array([0, 256, 513]))
    assert (places.tolist(), signs.tolist()) == ([81, 166, 201], [-1.0, 1.0, 1.0])


@needs_library
@pytest.mark.parametrize("name", [name for name in dtypes.NAMES if can_sketch(name)])
def test_native_sketch_equals_its_reference(name: str) -> None:
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((2, 9, 700)) * 3).astype(dtypes.numpy_dtype(name))
    index = sketch_index(values.shape, row_keys(INFO))
    assert isinstance(index, SketchIndex)
    found, wanted = sketch_of(values, index), sketch_reference(values.reshape(-1, 700), index)
    assert np.abs(found - wanted).max() <= 1e-6 * np.abs(wanted).max()


@given(st.integers(1, 40), st.integers(1, 900), st.integers(0, 2000), st.integers(0, 1 << 31))
def test_native_sketch_equals_its_reference_for_any_run_of_columns(
    rows: int, width: int, column: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, width)).astype(np.float32)
    values[rng.random(values.shape) < 0.01] = np.nan
    values[rng.random(values.shape) < 0.01] = np.inf
    keys = rng.integers(0, 1 << 32, rows).astype(np.uint32)
    runs = np.array([[0, column, width // 2], [width // 2, 3 * column + width, width - width // 2]], np.int64)
    index = SketchIndex(np.arange(rows), keys, runs, width, True)
    np.testing.assert_allclose(sketch_of(values, index), sketch_reference(values, index), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dims", ["b s h[tp] d", "b s (g+u)[tp] d", "b s h d[tp]", "b s h=12[tp] d"])
def test_sketches_of_shards_add_up_to_the_whole(dims: str) -> None:
    whole = np.random.default_rng(1).standard_normal((2, 9, 12, 40)).astype(np.float32)
    index = sketch_index(whole.shape, row_keys(INFO))
    assert isinstance(index, SketchIndex)
    total = np.zeros(256)
    for rank in range(2):
        if dims == "b s h d[tp]":
            part = whole[..., rank * 20 : rank * 20 + 20]
        elif "+" in dims:
            part = np.concatenate([whole[:, :, rank * 3 : rank * 3 + 3], whole[:, :, 6 + rank * 3 : 9 + rank * 3]], 2)
        else:
            part = whole[:, :, rank * 6 : rank * 6 + 6]
        placed = sketch_index(part.shape, row_keys(INFO), dims=dims, mesh={"tp": 2}, coords={"tp": rank})
        assert isinstance(placed, SketchIndex), placed
        total += sketch_of(part, placed)
    np.testing.assert_allclose(total, sketch_of(whole, index), atol=1e-4)


@given(st.integers(0, 9), st.booleans())
def test_sketch_is_equal_under_any_batching_and_padding(cut: int, packed: bool) -> None:
    rng = np.random.default_rng(2)
    rows = {("a", p): rng.standard_normal(70).astype(np.float32) for p in range(9)}
    whole = np.stack([rows["a", p] for p in range(9)])

    def taken(first: int, count: int) -> np.ndarray:
        if packed:
            info = StepInfo(step=0, grid=(count,), rows=(RowSpan("a", first, count, 0, 0),))
            values = whole[first : first + count]
        else:  # left-padded with arbitrary values
            info = StepInfo(step=0, grid=(1, count + 2), rows=(RowSpan("a", first, count, 0, 2),))
            values = np.concatenate([np.full((2, 70), np.nan, np.float32), whole[first : first + count]])[None]
        index = sketch_index(values.shape, row_keys(info))
        assert isinstance(index, SketchIndex)
        assert index.by_rows
        return sketch_of(values, index)

    parts = [taken(*span) for span in ((0, cut), (cut, 9 - cut)) if span[1]]
    np.testing.assert_allclose(np.sum(parts, 0), taken(0, 9), atol=1e-5)


def test_estimate_has_the_stated_error_and_interval() -> None:
    rng = np.random.default_rng(3)
    ratios, covered = [], 0
    for _ in range(400):
        rows = rng.integers(0, 1 << 32, 12).astype(np.uint32)
        index = SketchIndex(np.arange(12), rows, np.array([[0, 0, 300]]), 300, True)
        one = rng.standard_normal((12, 300)).astype(np.float32)
        two = one + 0.02 * rng.standard_normal((12, 300)).astype(np.float32) * (rng.random(300) < 0.1)
        true = float(np.linalg.norm(two - one) / np.linalg.norm(one))
        found = estimate(sketch_of(one, index), sketch_of(two, index))
        ratios.append(found.error / true)
        covered += found.low <= true <= found.high
    assert abs(float(np.mean(ratios)) - 1) < 0.02
    assert float(np.median(np.abs(np.array(ratios) - 1))) < 0.055
    assert covered / 400 > 0.92
    assert LOW_FACTOR < 1 < HIGH_FACTOR


def test_estimate_ignores_the_rounding_of_counters() -> None:
    one = np.linspace(-1, 1, 256, dtype=np.float32)
    assert estimate(one, np.nextafter(one, np.float32(2))).error == 0.0
    assert math.isinf(estimate(np.zeros(256, np.float32), one).error)


def test_estimate_of_counters_beyond_float32_is_a_number() -> None:
    one, two = np.ones(256, np.float32), np.ones(256, np.float32)
    one[3] = two[3] = np.inf
    one[5] = two[5] = np.nan
    assert estimate(one, two).error == 0.0
    two[7] = 2.0
    assert math.isinf(estimate(one, two).error)


def test_sketch_index_states_what_it_cannot_place() -> None:
    reason = sketch_index((9, 8), None, dims="t h[tp]", mesh={"tp": 2}, coords={})
    assert reason == "the place of this rank along tp is unknown"
    reason = sketch_index((9, 8), None, dims="t kv=2x4[tp]", mesh={"tp": 8}, coords={"tp": 1})
    assert reason == "sketches do not support the dims 't kv=2x4[tp]'"
