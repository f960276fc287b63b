"""Statistics and hash: the library and the numpy reference against each other and against plain arithmetic."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapscope import dtypes
from tapscope.errors import RunCorruptError
from tapscope.kernels.native import backend, summarize, summarize_array, use_backend
from tapscope.kernels.native.digests import mix64, partial_hash
from tapscope.kernels.native.reference import summarize_reference, to_words
from tapscope.record import Stats

BACKENDS = ["numpy", pytest.param("c++", marks=pytest.mark.skipif(backend()[0] != "c++", reason=backend()[1]))]
PLAIN = [name for name in dtypes.NAMES if name not in dtypes.COMPLEX]
COUNTS = ("count", "nan", "posinf", "neginf", "zeros", "subnormals")
LENGTHS = [0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 1023, 2047, 2048, 2049, 4099]


@pytest.fixture(params=BACKENDS)
def kind(request):
    with use_backend(request.param):
        yield request.param


def random_bits(dtype, length, seed=0):
    """Every bit pattern of the dtype is as likely as any other: NaNs, infinities and subnormals included."""
    width = dtypes.itemsize(dtype)
    raw = np.random.default_rng(seed).integers(0, 256, length * width, dtype=np.uint8)
    return (raw & 1 if dtype == "bool" else raw).view(dtypes.numpy_dtype(dtype))


def as_double(array):
    with np.errstate(all="ignore"):
        return array.astype(np.float64)


def close(got, want, scale):
    """Equal within what float32 blocks lose, relative to the sum of magnitudes."""
    return got == want or abs(got - want) <= 2e-6 * scale


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", PLAIN)
def test_both_backends_agree_on_random_bits(dtype, length):
    array = random_bits(dtype, length, seed=length)
    with use_backend(backend()[0]):
        got, *digests = summarize_array(array)
    want, *expected = summarize_reference(array)
    assert digests == expected
    assert [getattr(got, name) for name in COUNTS] == [getattr(want, name) for name in COUNTS]
    assert (got.min, got.max, got.absmax) == (want.min, want.max, want.absmax)
    finite = as_double(array)
    finite = finite[np.isfinite(finite)]
    with np.errstate(over="ignore"):
        assert close(got.sum, want.sum, np.abs(finite).sum())
    assert close(got.sumsq, want.sumsq, want.sumsq)


@pytest.mark.parametrize("dtype", PLAIN)
def test_counts_and_extremes_are_what_numpy_says(kind, dtype):
    array = random_bits(dtype, 5000, seed=3)
    values = as_double(array)
    finite = values[np.isfinite(values)]
    got = summarize_array(array).stats
    assert got.count == 5000
    assert got.nan == np.isnan(values).sum()
    assert got.posinf == np.isposinf(values).sum()
    assert got.neginf == np.isneginf(values).sum()
    assert got.zeros == (finite == 0).sum()
    assert (got.min, got.max) == (finite.min(), finite.max())
    assert got.absmax == np.abs(finite).max()


def test_the_exponent_format_has_neither_zeros_nor_subnormals(kind):
    got = summarize_array(np.arange(256, dtype=np.uint8).view(dtypes.numpy_dtype("float8_e8m0fnu"))).stats
    assert (got.nan, got.zeros, got.subnormals) == (1, 0, 0)
    assert (got.min, got.max) == (2.0**-127, 2.0**127)


@pytest.mark.parametrize("dtype", [name for name in PLAIN if dtypes.is_float(name) and name != "float8_e8m0fnu"])
def test_subnormals_are_counted_by_the_smallest_normal_number(kind, dtype):
    import ml_dtypes

    info = ml_dtypes.finfo(dtypes.numpy_dtype(dtype))
    smallest, tiny = info.smallest_normal, info.smallest_subnormal
    array = np.array([smallest, -smallest, tiny, -tiny, 0.0, -0.0, 1.0], dtypes.numpy_dtype(dtype))
    got = summarize_array(array).stats
    assert (got.subnormals, got.zeros) == (2, 2)
    assert got.min == -float(smallest)


def test_a_tensor_of_nothing_finite_has_no_extremes(kind):
    got = summarize_array(np.array([np.nan, np.inf, -np.inf, -np.nan], np.float32)).stats
    assert (got.nan, got.posinf, got.neginf) == (2, 1, 1)
    assert (got.min, got.max, got.absmax, got.sum, got.sumsq) == (None, None, None, 0.0, 0.0)


def test_an_empty_tensor_is_summarised(kind):
    got = summarize(0, 0, "bfloat16")
    assert got == (Stats(0, 0, 0, 0, 0, 0, None, None, None, 0.0, 0.0), "0" * 32, "0" * 16)


@pytest.mark.parametrize("scale", [1e-30, 1e-42, 1.0, 1e30])
def test_squares_neither_overflow_nor_vanish_in_float32(kind, scale):
    array = (np.linspace(-1, 1, 3000) * scale).astype(np.float32)
    values = array.astype(np.float64)
    got = summarize_array(array).stats
    assert got.sumsq == pytest.approx((values * values).sum(), rel=2e-6)


def test_one_infinity_hides_no_other_value(kind):
    array = np.ones(4096, np.float16)
    array[7] = np.inf
    got = summarize_array(array).stats
    assert (got.sum, got.sumsq, got.posinf, got.max) == (4095.0, 4095.0, 1, 1.0)


@pytest.mark.parametrize("dtype", PLAIN)
def test_unaligned_memory_gives_the_same_answer(kind, dtype):
    array = random_bits(dtype, 2051, seed=9)
    room = np.zeros(array.nbytes + 3, np.uint8)
    room[3:] = array.view(np.uint8)
    assert summarize(room.ctypes.data + 3, array.size, dtype) == summarize_array(array)


@pytest.mark.parametrize(("dtype", "part"), dtypes.COMPLEX.items())
def test_complex_numbers_are_pairs(kind, dtype, part):
    array = np.array([1 + 2j, 3 - 4j], dtype)
    assert summarize_array(array) == summarize_array(array.view(part))
    assert summarize(array.ctypes.data, 2, dtype).stats.count == 4


def test_zeros_lose_their_sign_in_the_statistics(kind):
    got = summarize_array(np.array([-0.0, 0.0, -0.0], np.float32)).stats
    assert [math.copysign(1.0, x) for x in (got.min, got.max, got.absmax, got.sum)] == [1.0] * 4


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("signs", [(1,), (-1,), (1, -1)])
@pytest.mark.parametrize("special", [None, 0.0, -0.0, "tiny", np.inf, -np.inf, np.nan])
def test_extremes_whatever_the_signs(kind, dtype, signs, special):
    """All positive, all negative or both, with one value that the fast way must notice."""
    import ml_dtypes

    rng = np.random.default_rng(11)
    values = (rng.uniform(0.5, 9.0, 700) * rng.choice(signs, 700)).astype(dtypes.numpy_dtype(dtype))
    if special is not None:
        values[123] = ml_dtypes.finfo(values.dtype).smallest_subnormal if special == "tiny" else special
    exact = as_double(values)
    finite = exact[np.isfinite(exact)]
    got = summarize_array(values).stats
    assert (got.min, got.max, got.absmax) == (finite.min(), finite.max(), np.abs(finite).max())
    assert (got.zeros, got.subnormals) == (int(special == 0.0), int(special == "tiny"))
    assert got.nonfinite == 700 - finite.size


def test_an_unknown_dtype_is_refused(kind):
    with pytest.raises(RunCorruptError, match="unknown dtype 'int4'"):
        summarize(0, 0, "int4")


def test_a_view_with_strides_is_refused(kind):
    with pytest.raises(ValueError, match="C-contiguous"):
        summarize_array(np.zeros((4, 4), np.float32).T[1:])


# ---- the hash, which is part of the run format


def splitmix_hash(data: bytes) -> str:
    """The definition in the docstring, one Python integer at a time."""
    mask = (1 << 64) - 1
    h1 = h2 = 0
    for index, start in enumerate(range(0, len(data), 8)):
        word = int.from_bytes(data[start : start + 8], "little")
        mixed = mix64(word + (index + 1) * 0x9E3779B97F4A7C15)
        again = (mixed * 0xD6E8FEB86659FD93) & mask
        h1, h2 = h1 + mixed, h2 + (again ^ (again >> 32))
    return f"{mix64(h1 + len(data)):016x}{mix64(h2 + len(data)):016x}"


def test_the_hash_of_known_bytes_never_changes(kind):
    assert summarize_array(np.arange(10, dtype=np.float32)).hash == "2a985e290fd3c1e681b1f9f2af7ff82b"
    assert summarize_array(np.arange(256, dtype=np.uint8)).hash == "5c109d37b913e26f1a4bfaa507bdb67d"


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300))
def test_the_hash_is_its_definition(data):
    for name in {"numpy", backend()[0]}:
        with use_backend(name):
            assert summarize_array(np.frombuffer(data, np.uint8)).hash == splitmix_hash(data)


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=16, max_size=4096), st.data())
def test_one_flipped_bit_or_two_swapped_words_change_the_hash(data, draw):
    array = np.frombuffer(data, np.uint8).copy()
    before = summarize_array(array).hash
    bit = draw.draw(st.integers(0, 8 * array.size - 1))
    array[bit // 8] ^= 1 << bit % 8
    assert summarize_array(array).hash != before
    array[bit // 8] ^= 1 << bit % 8
    words = array[: array.size // 8 * 8].view(np.uint64)
    one, two = (draw.draw(st.integers(0, words.size - 1)) for _ in range(2))
    same = words[one] == words[two]
    words[[one, two]] = words[[two, one]]
    assert (summarize_array(array).hash == before) == same


def test_zeros_of_different_lengths_have_different_hashes(kind):
    assert len({summarize_array(np.zeros(n, np.uint8)).hash for n in range(40)}) == 40


def test_the_hash_is_of_bytes_whatever_the_dtype(kind):
    raw = random_bits("uint8", 4096, seed=5)
    assert len({summarize_array(raw.view(dtypes.numpy_dtype(name))).hash for name in PLAIN if name != "bool"}) == 1


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 5000), st.lists(st.integers(0, 700), max_size=5))
def test_any_split_into_blocks_gives_the_same_sums(nbytes, cuts):
    words = to_words(random_bits("uint8", nbytes, seed=nbytes))
    edges = sorted({0, words.size, *(min(cut, words.size) for cut in cuts)})
    parts = [partial_hash(words[a:b], a) for a, b in itertools.pairwise(edges)]
    whole = partial_hash(words, 0)
    for i in range(2):
        assert sum(part[i] for part in reversed(parts)) % 2**64 == whole[i]


@pytest.mark.parametrize("chunk", [8, 64, 2048, 65536])
def test_the_reference_does_not_depend_on_its_chunk(chunk):
    array = random_bits("bfloat16", 3001, seed=1)
    (got, *digests), (want, *expected) = summarize_reference(array, chunk), summarize_reference(array)
    assert replace(got, sum=0.0, sumsq=0.0) == replace(want, sum=0.0, sumsq=0.0)
    assert digests == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32), max_size=200))
def test_sums_match_exact_summation(values):
    array = np.array(values, np.float32)
    finite = [float(v) for v in array if math.isfinite(v)]
    for name in {"numpy", backend()[0]}:
        with use_backend(name):
            got = summarize_array(array).stats
        assert close(got.sum, math.fsum(finite), math.fsum(map(abs, finite)))
        assert got.sumsq == pytest.approx(math.fsum(v * v for v in finite), rel=2e-6, abs=0)
