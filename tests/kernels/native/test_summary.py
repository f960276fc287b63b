"""Statistics and hash: the C++ library against the numpy reference and against plain arithmetic."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from native_helpers import BACKENDS

from tapscope.core import dtypes
from tapscope.core.errors import RunCorruptError
from tapscope.kernels.native import backend, digest_of, summarize, summarize_array, use_backend
from tapscope.kernels.native.digests import mix64, partial_hash
from tapscope.kernels.native.reference import summarize_reference, to_words
from tapscope.run_format.record import Stats

PLAIN = [name for name in dtypes.NAMES if name not in dtypes.COMPLEX]
COUNTS = ("count", "nan", "posinf", "neginf", "zeros", "subnormals")
LENGTHS = [0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 1023, 2047, 2048, 2049, 4099]


@pytest.fixture(params=BACKENDS)
def kind(request):
    with use_backend(request.param):
        yield request.param


def random_bits(dtype, length, seed=0):
    """Return values of uniformly random bit patterns, including NaNs, infinities and subnormals."""
    width = dtypes.itemsize(dtype)
    raw = np.random.default_rng(seed).integers(0, 256, length * width, dtype=np.uint8)
    return (raw & 1 if dtype == "bool" else raw).view(dtypes.numpy_dtype(dtype))


def as_double(array):
    with np.errstate(all="ignore"):
        return array.astype(np.float64)


def close(got, want, scale):
    """Return whether sums agree within the float32 rounding of blocks, relative to the magnitudes ``scale``."""
    return got == want or abs(got - want) <= 2e-6 * scale


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", PLAIN)
def test_summary_backends_agree_on_random_bits(dtype, length):
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
def test_summary_counts_and_extremes_match_numpy(kind, dtype):
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


def test_summary_of_e8m0_has_neither_zeros_nor_subnormals(kind):
    got = summarize_array(np.arange(256, dtype=np.uint8).view(dtypes.numpy_dtype("float8_e8m0fnu"))).stats
    assert (got.nan, got.zeros, got.subnormals) == (1, 0, 0)
    assert (got.min, got.max) == (2.0**-127, 2.0**127)


@pytest.mark.parametrize("dtype", [name for name in PLAIN if dtypes.is_float(name) and name != "float8_e8m0fnu"])
def test_summary_counts_subnormals(kind, dtype):
    import ml_dtypes

    info = ml_dtypes.finfo(dtypes.numpy_dtype(dtype))
    smallest, tiny = info.smallest_normal, info.smallest_subnormal
    array = np.array([smallest, -smallest, tiny, -tiny, 0.0, -0.0, 1.0], dtypes.numpy_dtype(dtype))
    got = summarize_array(array).stats
    assert (got.subnormals, got.zeros) == (2, 2)
    assert got.min == -float(smallest)


def test_summary_without_finite_values_has_no_extremes(kind):
    got = summarize_array(np.array([np.nan, np.inf, -np.inf, -np.nan], np.float32)).stats
    assert (got.nan, got.posinf, got.neginf) == (2, 1, 1)
    assert (got.min, got.max, got.absmax, got.sum, got.sumsq) == (None, None, None, 0.0, 0.0)


def test_summary_of_an_empty_tensor(kind):
    got = summarize(0, 0, "bfloat16")
    assert got == (Stats(0, 0, 0, 0, 0, 0, None, None, None, 0.0, 0.0), "0" * 32, "0" * 16)


@pytest.mark.parametrize("scale", [1e-30, 1e-42, 1.0, 1e30])
def test_summary_squares_neither_overflow_nor_vanish_in_float32(kind, scale):
    array = (np.linspace(-1, 1, 3000) * scale).astype(np.float32)
    values = array.astype(np.float64)
    got = summarize_array(array).stats
    assert got.sumsq == pytest.approx((values * values).sum(), rel=2e-6)


def test_summary_infinity_hides_no_other_value(kind):
    array = np.ones(4096, np.float16)
    array[7] = np.inf
    got = summarize_array(array).stats
    assert (got.sum, got.sumsq, got.posinf, got.max) == (4095.0, 4095.0, 1, 1.0)


@pytest.mark.parametrize("dtype", PLAIN)
def test_summary_of_unaligned_memory(kind, dtype):
    array = random_bits(dtype, 2051, seed=9)
    room = np.zeros(array.nbytes + 3, np.uint8)
    room[3:] = array.view(np.uint8)
    assert summarize(room.ctypes.data + 3, array.size, dtype) == summarize_array(array)


@pytest.mark.parametrize(("dtype", "part"), dtypes.COMPLEX.items())
def test_summary_of_complex_numbers_as_pairs(kind, dtype, part):
    array = np.array([1 + 2j, 3 - 4j], dtype)
    assert summarize_array(array) == summarize_array(array.view(part))
    assert summarize(array.ctypes.data, 2, dtype).stats.count == 4


def test_summary_zeros_have_no_sign(kind):
    got = summarize_array(np.array([-0.0, 0.0, -0.0], np.float32)).stats
    assert [math.copysign(1.0, x) for x in (got.min, got.max, got.absmax, got.sum)] == [1.0] * 4


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("signs", [(1,), (-1,), (1, -1)])
@pytest.mark.parametrize("special", [None, 0.0, -0.0, "tiny", np.inf, -np.inf, np.nan])
def test_summary_extremes_with_any_signs(kind, dtype, signs, special):
    """All positive, all negative or mixed, with one value that the fast path must detect."""
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


def test_summary_refuses_an_unknown_dtype(kind):
    with pytest.raises(RunCorruptError, match="unknown dtype 'int4'"):
        summarize(0, 0, "int4")


def test_summary_refuses_strided_views(kind):
    with pytest.raises(ValueError, match="C-contiguous"):
        summarize_array(np.zeros((4, 4), np.float32).T[1:])


# ---- the hash, which is part of the run format


STEP, OTHER = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93


def product(word, key):
    low, high = (word + key) % 2**32, ((word >> 32) + (key >> 32)) % 2**32
    return low * high


def plain_hash(data: bytes) -> str:
    """Compute the hash by its definition in digests.py, with Python integers."""
    h1 = h2 = len(data)
    words = [int.from_bytes(data[start : start + 8], "little") for start in range(0, len(data), 8)]
    for block in range(-(-len(words) // 1024)):
        one = two = 0
        for j, word in enumerate(words[1024 * block : 1024 * (block + 1)]):
            one += product(word, mix64((j + 1) * STEP))
            two += product(word, mix64((j + 9) * STEP))
        h1, h2 = h1 + mix64(one + (block + 1) * STEP), h2 + mix64(two + (block + 1) * OTHER)
    return f"{mix64(h1):016x}{mix64(h2):016x}"


def test_hash_golden_values(kind):
    assert summarize_array(np.arange(10, dtype=np.float32)).hash == "6a50ca7236346a366a15b1ceee88b5e6"
    assert summarize_array(np.arange(256, dtype=np.uint8)).hash == "9b25d61c18ca399a4b9590ab94340ecb"
    assert summarize_array(np.arange(5000, dtype=np.float64)).hash == "5796a4ae9dd44020ee811374fa77440e"


@settings(max_examples=60)
@given(st.binary(max_size=300))
def test_hash_matches_its_definition(data):
    for name in {"numpy", backend()[0]}:
        with use_backend(name):
            assert summarize_array(np.frombuffer(data, np.uint8)).hash == plain_hash(data)


@pytest.mark.parametrize("nbytes", [8191, 8192, 8193, 8256, 16383, 16385, 24576 + 7 * 64 + 5])
def test_hash_matches_its_definition_at_block_boundaries(kind, nbytes):
    array = random_bits("uint8", nbytes, seed=nbytes)
    assert summarize_array(array).hash == plain_hash(array.tobytes())
    assert digest_of(array.ctypes.data, nbytes).hex() == plain_hash(array.tobytes())


@settings(max_examples=40)
@given(st.binary(min_size=16, max_size=4096), st.data())
def test_hash_detects_a_flipped_bit_or_swapped_words(data, draw):
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


def test_hash_distinguishes_lengths_of_zeros(kind):
    assert len({summarize_array(np.zeros(n, np.uint8)).hash for n in range(40)}) == 40


def test_hash_depends_on_bytes_not_dtype(kind):
    raw = random_bits("uint8", 4096, seed=5)
    assert len({summarize_array(raw.view(dtypes.numpy_dtype(name))).hash for name in PLAIN if name != "bool"}) == 1


@settings(max_examples=40)
@given(st.integers(0, 80000), st.lists(st.integers(0, 9), max_size=5), st.randoms())
def test_hash_is_additive_over_block_aligned_splits(nbytes, cuts, random):
    words = to_words(random_bits("uint8", nbytes, seed=nbytes))
    edges = sorted({0, words.size, *(min(cut * 1024, words.size) for cut in cuts)})
    stretches = list(itertools.pairwise(edges))
    random.shuffle(stretches)
    parts = [partial_hash(words[a:b], a // 1024) for a, b in stretches]
    whole = partial_hash(words, 0)
    for i in range(2):
        assert sum(part[i] for part in parts) % 2**64 == whole[i]


@pytest.mark.parametrize("dtype", ["bfloat16", "uint8", "float64"])
def test_summary_reference_does_not_depend_on_its_chunk(dtype):
    array = random_bits(dtype, 70001, seed=1)
    (got, *digests), (want, *expected) = summarize_reference(array, 8192), summarize_reference(array)
    assert replace(got, sum=0.0, sumsq=0.0) == replace(want, sum=0.0, sumsq=0.0)
    assert digests == expected


@settings(max_examples=60)
@given(st.lists(st.floats(width=32), max_size=200))
def test_summary_sums_match_exact_summation(values):
    array = np.array(values, np.float32)
    finite = [float(v) for v in array if math.isfinite(v)]
    for name in {"numpy", backend()[0]}:
        with use_backend(name):
            got = summarize_array(array).stats
        assert close(got.sum, math.fsum(finite), math.fsum(map(abs, finite)))
        assert got.sumsq == pytest.approx(math.fsum(v * v for v in finite), rel=2e-6, abs=0)
