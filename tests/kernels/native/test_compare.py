"""Row comparison: both backends against a plain float64 computation, and the algebra of merging measures."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import BACKENDS, needs_library

from tapscope.core import dtypes
from tapscope.kernels.native import Measure, RowMeasures, Strip, backend, compare_rows, compare_strips, use_backend
from tapscope.kernels.native.compare import compare_reference
from tapscope.kernels.native.measure import FLOATS, INTEGERS
from tapscope.kernels.native.row_blocks import Summands

PLAIN = [name for name in dtypes.NAMES if name not in dtypes.COMPLEX]
COUNTS = ("equal", "over", "finite", "nonfinite_baseline", "nonfinite_target", "nonfinite_mismatch")
SUMS = ("sum_abs", "sum_sq_diff", "sum_sq_baseline", "sum_sq_target")


@pytest.fixture(params=BACKENDS)
def kind(request):
    with use_backend(request.param):
        yield request.param


def matrix(dtype, rows, width, seed=0, bits=False):
    """Return a random matrix of ``dtype``; with ``bits``, all bit patterns occur."""
    rng = np.random.default_rng(seed)
    kind = dtypes.numpy_dtype(dtype)
    if bits and dtype != "bool":
        return rng.integers(0, 256, (rows, width * kind.itemsize), dtype=np.uint8).view(kind)
    if dtype == "bool":
        return rng.random((rows, width)) < 0.5
    if not dtypes.is_float(dtype):
        return rng.integers(0, 100, (rows, width)).astype(kind)
    return (rng.standard_normal((rows, width)) * 4).astype(kind)


def nudged(array, seed=1):
    """Return a copy with about a third of the values changed slightly."""
    rng = np.random.default_rng(seed)
    if array.dtype == np.bool_:
        return array ^ (rng.random(array.shape) < 0.3)
    step = rng.integers(-1, 2, array.shape) if array.dtype.kind in "iu" else rng.standard_normal(array.shape) * 0.01
    moved = array.astype(np.float64) + np.where(rng.random(array.shape) < 0.3, step, 0)
    if array.dtype.kind == "u":
        moved = np.abs(moved)
    return moved.astype(array.dtype)


def plain_measures(a, b, atol=0.0, rtol=0.0):
    """Compute the fields of RowMeasures element by element in float64; 64-bit integers stay below 2^53 here."""
    with np.errstate(all="ignore"):
        x, y = a.astype(np.float64), b.astype(np.float64)
        both = np.isfinite(x) & np.isfinite(y)
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        mismatch = ~both & ~same
        x0, y0 = np.where(both, x, 0), np.where(both, y, 0)
        distance = np.abs(x0 - y0)
        return {
            "max_abs": np.where(both, distance, 0).max(axis=1, initial=0.0),
            "sum_abs": distance.sum(axis=1),
            "sum_sq_diff": (distance**2).sum(axis=1),
            "sum_sq_baseline": (x0**2).sum(axis=1),
            "sum_sq_target": (y0**2).sum(axis=1),
            "dot": (x0 * y0).sum(axis=1),
            "equal": same.sum(axis=1),
            "over": ((both & (distance > atol + rtol * np.abs(x0))) | mismatch).sum(axis=1),
            "finite": both.sum(axis=1),
            "nonfinite_baseline": (~np.isfinite(x)).sum(axis=1),
            "nonfinite_target": (~np.isfinite(y)).sum(axis=1),
            "nonfinite_mismatch": mismatch.sum(axis=1),
        }, np.where(both, distance, -1.0)


def check(got, a, b, **tolerance):
    want, distance = plain_measures(a, b, **tolerance)
    for name in COUNTS:
        np.testing.assert_array_equal(getattr(got, name), want[name], err_msg=name)
    for name in ("max_abs", *SUMS):
        np.testing.assert_allclose(getattr(got, name), want[name], rtol=3e-6, atol=0, err_msg=name)
    with np.errstate(over="ignore"):
        norms = np.sqrt(want["sum_sq_baseline"]) * np.sqrt(want["sum_sq_target"])
        assert (np.isinf(norms) | (np.abs(got.dot - want["dot"]) <= 3e-6 * norms)).all()
    for row, column in enumerate(got.argmax):
        if column < 0:
            assert want["finite"][row] == 0
        else:
            assert distance[row, column] == pytest.approx(want["max_abs"][row], rel=1e-6, abs=0)
    assert (got.width == a.shape[1]).all()


def same(one, two):
    """Check that counts and indices are equal, and sums approximately."""
    for name in (*FLOATS, *INTEGERS):
        left, right = getattr(one, name), getattr(two, name)
        np.testing.assert_allclose(left, right, rtol=3e-6, atol=1e-12 if name in SUMS else 0, err_msg=name)


@pytest.mark.parametrize("target", PLAIN)
@pytest.mark.parametrize("baseline", PLAIN)
def test_compare_every_pair_of_dtypes_by_value(kind, baseline, target):
    a, b = matrix(baseline, 4, 2100, seed=1), matrix(target, 4, 2100, seed=2)
    check(compare_rows(a, b, atol=0.5, rtol=0.1), a, b, atol=0.5, rtol=0.1)


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("tolerance", [{}, {"atol": 0.01}, {"rtol": 0.01}, {"atol": 1e-40, "rtol": 1e-35}])
def test_compare_nearly_equal_matrices_of_one_dtype(kind, dtype, tolerance):
    a = matrix(dtype, 3, 4500)
    b = nudged(a)
    check(compare_rows(a, b, **tolerance), a, b, **tolerance)


@pytest.mark.parametrize("dtype", [name for name in PLAIN if dtypes.is_float(name)])
def test_compare_classifies_any_bit_pattern(kind, dtype):
    a = matrix(dtype, 6, 2500, seed=1, bits=True)
    b = np.where(np.random.default_rng(2).random(a.shape) < 0.5, a, matrix(dtype, 6, 2500, seed=3, bits=True))
    with np.errstate(over="ignore"):
        check(compare_rows(a, b, rtol=0.5), a, b, rtol=0.5)


@pytest.mark.parametrize("dtype", [name for name in PLAIN if dtypes.numpy_dtype(name).itemsize == 1])
def test_compare_every_pair_of_fp8_codes(kind, dtype):
    codes = np.arange(256, dtype=np.uint8)
    one, two = np.repeat(codes, 256), np.tile(codes, 256)
    finite = np.isfinite(codes.view(dtypes.numpy_dtype(dtype)).astype(np.float64))
    for kept in (np.ones(len(one), np.bool_), finite[one] & finite[two]):
        a, b = (side[kept].view(dtypes.numpy_dtype(dtype)).reshape(1, -1) for side in (one, two))
        check(compare_rows(a, b), a, b)


NARROW = [name for name in PLAIN if name.startswith("float8") and name != "float8_e8m0fnu"]


@pytest.mark.parametrize("dtype", NARROW)
def test_compare_ulp_distance_of_any_two_codes(kind, dtype):
    one, two = (side.astype(np.uint8).reshape(-1, 1) for side in divmod(np.arange(65536), 256))
    a, b = (np.hstack([np.zeros_like(side), side]).view(dtypes.numpy_dtype(dtype)) for side in (one, two))
    wide = [side[:, 1].astype(np.float64) for side in (a, b)]
    finite = np.isfinite(wide[0]) & np.isfinite(wide[1])
    found, distance = compare_rows(a, b), np.abs(wide[0][finite] - wide[1][finite])
    np.testing.assert_allclose(found.max_abs[finite], distance, rtol=1e-7, atol=0)
    np.testing.assert_array_equal(found.argmax[finite], distance > 0)
    np.testing.assert_array_equal(found.equal[finite], 2 - (distance > 0))


@settings(max_examples=60)
@given(
    st.sampled_from(NARROW),
    st.one_of(st.integers(1, 200), st.integers(1, 20000)),
    st.integers(0, 63),
    st.sampled_from([0.0, 0.001, 0.1, 1.0]),
    st.sampled_from([0.0, 0.5]),
    st.integers(0, 2**32 - 1),
)
def test_compare_fp8_tensors_with_any_difference(dtype, width, offset, share, zeros, seed):
    rng, scalar = np.random.default_rng(seed), dtypes.numpy_dtype(dtype)
    finite = np.arange(256, dtype=np.uint8)
    finite = finite[np.isfinite(finite.view(scalar).astype(np.float64))]
    zero_codes = finite[finite.view(scalar).astype(np.float64) == 0]  # both zeros, where the dtype has two
    left = np.where(rng.random((3, width)) < zeros, rng.choice(zero_codes, (3, width)), rng.choice(finite, (3, width)))
    other = np.where(left & 0x7F, left, rng.choice(zero_codes, (3, width)))
    right = np.where(rng.random((3, width)) < share, rng.choice(finite, (3, width)), other)
    raw = [bytes(offset) + side.tobytes() for side in (left, right)]
    a, b = (np.frombuffer(side, scalar, offset=offset).reshape(3, width) for side in raw)
    distance = np.abs(a.astype(np.float64) - b.astype(np.float64)).astype(np.float32)
    for kind in ("numpy", backend()[0]):
        with use_backend(kind):
            got = compare_rows(a, b)
        check(got, a, b)
        if kind == "c++":
            assert got.argmax.tolist() == distance.argmax(axis=1).tolist()


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e-12, 1e12, 1e30, 3e38])
def test_compare_extreme_magnitudes_neither_overflow_nor_vanish(kind, scale):
    x = (np.random.default_rng(0).uniform(-1, 1, (2, 3000)) * scale).astype(np.float32)
    check(compare_rows(x, -x), x, -x)
    check(compare_rows(x, x[:, ::-1].copy(), rtol=0.3), x, x[:, ::-1].copy(), rtol=0.3)


def test_compare_keeps_tiny_differences_between_large_values(kind):
    a = np.ones((1, 4096), np.float32)
    b = a.copy()
    a[0, 5] = 0.0
    b[0, 5] = 1e-30
    got = compare_rows(a, b).total()
    assert (got.max_abs, got.worst_col) == (pytest.approx(1e-30), 5)
    assert got.rel_l2 == pytest.approx(1e-30 / math.sqrt(4095), rel=1e-6)


def test_compare_value_exactly_at_its_tolerance_passes(kind):
    a = np.full((1, 3000), 100.0, np.float32)
    b = a + 1.0
    assert compare_rows(a, b, rtol=0.01).over[0] == 0
    assert compare_rows(a, b, atol=1.0).over[0] == 0
    assert compare_rows(a, b, atol=0.9999999).over[0] == 3000
    third = np.full((1, 3000), 0.1, np.float32)
    assert compare_rows(np.zeros_like(third), third, atol=0.1).over[0] == 3000  # float32(0.1) > 0.1


def test_compare_distinguishes_integers_beyond_2_to_the_53(kind):
    a = np.array([[2**53 + 1, 2**63 - 1, -(2**63), 5]], np.int64)
    b = np.array([[2**53, 2**63 - 1, -(2**63) + 1, 5]], np.int64)
    got = compare_rows(a, b).total()
    assert (got.equal, got.max_abs, got.worst_col, got.over) == (2, 1.0, 0, 2)
    u = np.array([[2**64 - 1, 0]], np.uint64)
    assert compare_rows(u, u - np.array([[1, 0]], np.uint64)).max_abs[0] == 1.0
    assert compare_rows(np.array([[-1]], np.int64), u[:, :1]).max_abs[0] == 2.0**64
    assert compare_rows(np.array([[-1]], np.int32), u[:, :1]).equal[0] == 0
    assert compare_rows(np.array([[2**53 + 1]], np.int64), np.array([[7]], np.uint8)).sum_abs[0] == 2.0**53 - 6


def test_compare_matches_nonfinite_values_by_class(kind):
    a = np.array([[np.nan, np.inf, -np.inf, np.inf, 1.0, np.nan, 2.0]], np.float32)
    b = np.array([[-np.nan, np.inf, -np.inf, -np.inf, np.nan, 3.0, 2.0]], np.float32)
    got = compare_rows(a, b)
    assert (got.equal[0], got.nonfinite_mismatch[0], got.over[0], got.finite[0]) == (4, 3, 3, 1)
    assert (got.nonfinite_baseline[0], got.nonfinite_target[0]) == (5, 5)
    assert (got.max_abs[0], got.argmax[0]) == (0.0, 6)


def test_compare_positive_and_negative_zero_are_equal(kind):
    for dtype in (np.float32, np.float16, dtypes.numpy_dtype("bfloat16"), np.float64):
        zero = np.zeros((1, 10), dtype)
        got = compare_rows(zero, -zero).total()
        assert (got.equal, got.over, got.rel_l2, got.cosine) == (10, 0, 0.0, 1.0)


def test_compare_gathers_rows_from_strided_read_only_memory(kind, tmp_path):
    file = tmp_path / "payload"
    rows, width, stride = 7, 33, 33 * 4 + 5
    raw = np.random.default_rng(0).integers(0, 256, 3 + rows * stride, dtype=np.uint8)
    values = matrix("float32", rows, width)
    for i in range(rows):
        raw[3 + i * stride : 3 + i * stride + width * 4] = values[i].view(np.uint8)
    raw.tofile(file)
    mapped = np.memmap(file, np.uint8, mode="r")
    view = np.ndarray((rows, width), np.float32, buffer=mapped, offset=3, strides=(stride, 4))
    target = nudged(values)
    left, right = np.array([6, 0, 3, 3]), np.array([1, 0, 3, 2])
    check(compare_rows(view, target, left, right), values[left], target[right])
    check(compare_rows(view, target[::-1]), values, target[::-1])
    check(compare_rows(view, target, left, np.array([0, 1, 2, 3])), values[left], target[:4])
    del view
    mapped._mmap.close()


def test_compare_accepts_a_broadcast_row(kind):
    a, row = matrix("bfloat16", 5, 40), matrix("bfloat16", 1, 40, seed=8)
    wide = np.broadcast_to(row, (5, 40))
    check(compare_rows(a, wide), a, wide)


@pytest.mark.parametrize("dtype", dtypes.COMPLEX)
def test_compare_complex_numbers_as_pairs_of_columns(kind, dtype):
    a = np.array([[1 + 2j, 3 + 4j]], dtype)
    b = np.array([[1 + 2j, 3 + 7j]], dtype)
    got = compare_rows(a, b).total()
    assert (got.count, got.worst_col, got.max_abs) == (4, 3, 3.0)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_compare_empty_tensors_gives_empty_metrics(kind, shape):
    got = compare_rows(np.zeros(shape, np.float32), np.zeros(shape, np.float32))
    assert len(got) == shape[0]
    assert got.total() == Measure(
        max_abs=0.0, worst_row=-1, worst_col=-1, mean_abs=0.0, rel_l2=0.0, rel=0.0, cosine=1.0, equal=0, count=0,
        over=0, finite=0, nonfinite_baseline=0, nonfinite_target=0, nonfinite_mismatch=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"baseline": np.zeros(4)}, ValueError, r"shape \[rows, width\], not \(4,\)"),
        ({"baseline": np.zeros((3, 5))}, ValueError, "one width, not 5"),
        ({"baseline": np.zeros((2, 4))}, ValueError, "2 on the baseline side, 3 on the target side"),
        ({"baseline": np.zeros((4, 3)).T}, ValueError, "unit stride"),
        ({"baseline": np.zeros((3, 4), "U1")}, ValueError, "dtype str32; known: float64, float32"),
        ({"baseline_rows": np.array([0, 1, 3])}, IndexError, r"holds 0\.\.3; rows run 0\.\.2"),
        ({"target_rows": np.array([-1, 1, 2])}, IndexError, r"holds -1\.\.2"),
        ({"target_rows": np.array([1])}, ValueError, "3 on the baseline side, 1 on the target side"),
        ({"target_rows": np.array([[1]])}, ValueError, "one-dimensional"),
        ({"target_rows": np.array([0.5, 1, 2])}, ValueError, "integers"),
        ({"atol": -1.0}, ValueError, "not negative"),
        ({"rtol": math.nan}, ValueError, "finite"),
    ],
)
def test_compare_refuses_invalid_arguments(kind, change, error, message):
    call = {"baseline": np.zeros((3, 4)), "target": np.zeros((3, 4), np.float32), **change}
    with pytest.raises(error, match=message):
        compare_rows(**call)


SPECIAL = (math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-42, 6e-8, 65504.0, 3e38, 1e-30)


@settings(max_examples=100)
@given(
    st.tuples(*[st.sampled_from(["float32", "bfloat16", "float16"])] * 2),
    st.integers(1, 40),
    st.one_of(st.integers(1, 70), st.integers(120, 300)),
    st.integers(0, 63),
    st.sampled_from([0.0, 0.001, 0.3]),
    st.sampled_from([0.0, 0.25]),
    st.integers(0, 2**32 - 1),
)
def test_compare_rows_narrower_than_a_vector_at_any_offset(pair, rows, width, offset, odd, rtol, seed):
    rng = np.random.default_rng(seed)
    sides = []
    for name in pair:
        kind = dtypes.numpy_dtype(name)
        values = np.where(
            rng.random((rows, width)) < odd, rng.choice(SPECIAL, (rows, width)), rng.standard_normal((rows, width))
        )
        raw = np.empty(offset + values.size * kind.itemsize, np.uint8)
        side = raw[offset:].view(kind).reshape(rows, width)
        with np.errstate(over="ignore"):
            side[...] = values.astype(kind)
        sides.append(side)
    a, b = sides
    copied = rng.random(rows) < 0.3
    with np.errstate(over="ignore"):
        b[copied] = a[copied].astype(b.dtype)
    for kind in {"numpy", backend()[0]}:
        with use_backend(kind):
            check(compare_rows(a, b, rtol=rtol), a, b, rtol=rtol)


# ---- algebra


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(2, 5000), st.data())
def test_metrics_of_column_blocks_merge_in_any_order(rows, width, data):
    dtype = data.draw(st.sampled_from(["bfloat16", "float32", "float64", "int64"]))
    a = matrix(dtype, rows, width, seed=width)
    b = nudged(a, seed=rows)
    cut = data.draw(st.integers(1, width - 1))
    whole = compare_rows(a, b, rtol=0.01)
    left = compare_rows(a[:, :cut], b[:, :cut], rtol=0.01)
    right = compare_rows(a[:, cut:], b[:, cut:], rtol=0.01)
    same(left + right, whole)
    nothing = compare_rows(a[:, :0], b[:, :0])
    same(nothing.merge_columns(right, cut).merge_columns(left, 0), whole)


@settings(max_examples=25)
@given(st.integers(0, 9), st.integers(1, 600), st.integers(0, 9))
def test_metrics_of_row_blocks_concatenate(rows, width, cut):
    a = matrix("float16", rows, width)
    b = nudged(a)
    whole = compare_rows(a, b)
    parts = RowMeasures.concat([compare_rows(a[:cut], b[:cut]), compare_rows(a[cut:], b[cut:])])
    same(parts, whole)
    assert parts.total() == whole.total()


def test_metrics_of_no_parts_are_empty():
    assert len(RowMeasures.concat([])) == 0


def test_metrics_of_different_rows_do_not_merge(kind):
    a = np.zeros((2, 3))
    with pytest.raises(ValueError, match="same rows, not 2 and 1"):
        compare_rows(a, a).merge_columns(compare_rows(a[:1], a[:1]), 3)


def test_metrics_total_equals_the_flattened_rows(kind):
    a = matrix("float32", 9, 700)
    b = nudged(a)
    b[4, 600] = 1000.0
    got, flat = compare_rows(a, b).total(), compare_rows(a.reshape(1, -1), b.reshape(1, -1)).total()
    assert (got.worst_row, got.worst_col) == (4, 600)
    assert flat.worst_col == 4 * 700 + 600
    for name in ("max_abs", "mean_abs", "rel_l2", "rel", "cosine", "equal", "count", "over"):
        assert getattr(got, name) == pytest.approx(getattr(flat, name), rel=1e-6)
    x, y = a.astype(np.float64), b.astype(np.float64)
    assert got.rel_l2 == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x), rel=1e-6)
    assert got.rel == pytest.approx(1 - 2 * (x * y).sum() / ((x * x).sum() + (y * y).sum()), rel=1e-6)
    assert got.cosine == pytest.approx((x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y), rel=1e-6)
    assert got.mean_abs == pytest.approx(np.abs(x - y).mean(), rel=1e-6)


@pytest.mark.parametrize(
    ("base", "target", "rel_l2", "rel", "cosine"),
    [(0, 0, 0.0, 0.0, 1.0), (0, 1, math.inf, 1.0, 0.0), (1, 0, 1.0, 1.0, 0.0), (1, -1, 2.0, 2.0, -1.0)],
)
def test_metrics_relative_error_and_cosine_at_their_limits(kind, base, target, rel_l2, rel, cosine):
    got = compare_rows(np.full((2, 3), base, np.float32), np.full((2, 3), target, np.float32)).total()
    assert (got.rel_l2, got.rel, got.cosine) == (rel_l2, rel, cosine)


@pytest.mark.parametrize("chunk", [1, 7, 64, 65536])
def test_compare_reference_does_not_depend_on_its_chunk(chunk):
    a = matrix("bfloat16", 5, 90)
    b = nudged(a)
    picked = np.array([4, 0, 1])
    same(
        compare_reference(a, b, picked, picked, pairs=3, chunk=chunk),
        compare_reference(a[picked], b[picked], pairs=3),
    )


# ---- the place of the largest difference


@settings(max_examples=60)
@given(
    st.sampled_from([("float32",) * 2, ("bfloat16",) * 2, ("float16",) * 2, ("float32", "bfloat16"), ("float64",) * 2,
                     ("int64",) * 2, ("float8_e4m3fn", "bfloat16"), ("int8", "int8"), ("float16", "bfloat16")]),
    st.integers(1, 5000),
    st.data(),
)  # fmt: skip
def test_compare_finds_the_first_largest_difference_anywhere(pair, width, data):
    places = data.draw(st.lists(st.integers(0, width - 1), min_size=1, max_size=4))
    a = np.ones((2, width), dtypes.numpy_dtype(pair[0]))
    b = np.ones((2, width), dtypes.numpy_dtype(pair[1]))
    b[1, places] = np.asarray(5).astype(b.dtype)
    for kind in ("numpy", backend()[0]):
        with use_backend(kind):
            got = compare_rows(a, b)
        assert got.argmax.tolist() == [0, min(places)]
        assert got.max_abs.tolist() == [0.0, 4.0]
        assert got.equal.tolist() == [width, width - len(set(places))]


def test_compare_distinguishes_large_float16_values_from_infinities(kind):
    a = np.full((3, 300), 65504, np.float16)
    b = a.copy()
    b[1, 7] = np.inf
    b[2, 9] = np.nan
    got = compare_rows(a, b)
    assert got.nonfinite_target.tolist() == [0, 1, 1]
    assert got.finite.tolist() == [300, 299, 299]
    assert got.equal.tolist() == [300, 299, 299]


@pytest.mark.parametrize("limit", [2**51 - 1, 2**51, 2**53, 2**62])
@pytest.mark.parametrize("sign", [1, -1])
def test_compare_integers_exactly_on_both_paths(kind, limit, sign):
    a = np.full((1, 700), sign * limit, np.int64)
    b = a.copy()
    b[0, 650] -= sign
    got = compare_rows(a, b)
    assert (got.equal[0], got.argmax[0], got.max_abs[0], got.over[0]) == (699, 650, 1.0, 1)


@settings(max_examples=40)
@given(st.sampled_from(["float32", "bfloat16", "int64"]), st.integers(1, 6), st.integers(1, 40), st.data())
def test_compare_strips_equal_the_whole(dtype, rows, width, data):
    a = matrix(dtype, rows, width, seed=rows * width, bits=dtype != "int64")
    b = nudged(a) if dtype == "int64" else matrix(dtype, rows, width, seed=7, bits=True)
    cut, split = data.draw(st.integers(0, rows)), data.draw(st.integers(0, width))
    order = np.array(data.draw(st.permutations(range(rows))))
    strips = [
        Strip(a[:cut, :split], b[:cut, :split]),
        Strip(a[:cut, split:], b[:cut, split:], column=split),
        Strip(a[order], b, order.argsort()[cut:], np.arange(cut, rows), row=cut),
    ]
    strips = [strip for strip in strips if strip.num_rows]
    for kind in [kind for kind in ("numpy", "c++") if kind in (backend()[0], "numpy")]:
        with use_backend(kind):
            whole, found = compare_rows(a, b), compare_strips(strips, rows)
        np.testing.assert_array_equal(found.rows.integers, whole.integers)
        np.testing.assert_allclose(found.rows.floats, whole.floats, rtol=1e-6)
        has_worst = whole.argmax >= 0
        at_worst = a[np.arange(rows), whole.argmax].astype(np.float64)
        np.testing.assert_array_equal(found.at_worst, np.where(has_worst, at_worst, 0.0))
        held = [strips[i] for i in found.strip]
        assert all(s.column <= column for s, column in zip(held, whole.argmax, strict=True) if column >= 0)
        assert all(s.row <= row < s.row + s.num_rows for row, s in enumerate(held))


@needs_library
@pytest.mark.parametrize(
    ("strip", "rows", "error"),
    [
        (Strip(np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32)), 2, ValueError),
        (Strip(np.zeros((2, 3), np.float32), np.zeros((1, 3), np.float32)), 2, ValueError),
        (Strip(np.zeros((2, 6), np.float32)[:, ::2], np.zeros((2, 3), np.float32)), 2, ValueError),
        (Strip(np.zeros(3, np.float32), np.zeros(3, np.float32)), 3, ValueError),
        (Strip(np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)), 1, ValueError),
        (Strip(np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32), np.array([2, 0])), 2, IndexError),
        (Strip(np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32), np.array([0, 1], np.int32)), 2, ValueError),
    ],
)
def test_compare_never_reads_outside_a_strip(strip, rows, error):
    with pytest.raises(error):
        compare_strips([strip], rows)


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float64", "int32", "uint8", "int64", "float8_e4m3fn"]
)
@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_compare_sums_as_their_total(kind, dtype, num_parts):
    rows, width = 7, 333
    parts = tuple(matrix(dtype, rows, width, seed=i) for i in range(num_parts))
    wide = "int64" if parts[0].dtype.kind in "iu" else "float64" if parts[0].dtype.itemsize >= 4 else "float32"
    side, other = Summands(np.dtype(wide), parts), matrix("float32", rows, width, seed=99)
    order = np.array([6, 0, 3])
    for strips in (
        [Strip(side, other)],
        [Strip(other, side)],
        [Strip(side, other, order, order[::-1].copy())],
        [
            Strip(side.select(np.s_[:, :100]), other[:, :100]),
            Strip(side.select(np.s_[:, 100:]), other[:, 100:], column=100),
        ],
    ):
        plain = [
            Strip(*(s.total() if isinstance(s, Summands) else s for s in strip[:2]), *strip[2:]) for strip in strips
        ]
        num = strips[0].num_rows
        got, expected = compare_strips(strips, num), compare_strips(plain, num)
        for one, two in zip(got[1:], expected[1:], strict=True):
            np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(got.rows.integers, expected.rows.integers)
        np.testing.assert_array_equal(got.rows.floats, expected.rows.floats)


@needs_library
def test_compare_refuses_sums_of_unlike_parts():
    parts = np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32)
    with pytest.raises(ValueError, match="summands must have one shape"):
        compare_strips([Strip(Summands(np.dtype("f8"), parts), np.zeros((2, 3), np.float32))], 2)
    with pytest.raises(ValueError, match="sums are not of dtype"):
        compare_strips([Strip(Summands(np.dtype("i4"), parts[:1]), np.zeros((2, 3), np.float32))], 2)
