"""take, digest_of and the bag: the library, numpy and the record line agree byte for byte."""

import json
import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import BACKENDS, needs_library

from tapscope.core import dtypes
from tapscope.core.errors import RunCorruptError
from tapscope.kernels.native import backend, digest_of, summarize_array, take, use_backend
from tapscope.kernels.native.digests import mix64, partial_bag
from tapscope.kernels.native.summary import MIN_BYTES_WITHOUT_GIL
from tapscope.run_format.record import Key, Record, encode, from_json

LENGTHS = [0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 100, 2047, 2048, 2049, 4095, 4096, 4097, 5000]
STEP = 0x9E3779B97F4A7C15


@pytest.fixture(params=BACKENDS)
def kind(request):
    with use_backend(request.param):
        yield request.param


def kinds():
    return {"numpy", backend()[0]}


def random_bits(dtype, length, seed=0):
    width = dtypes.itemsize(dtype)
    raw = np.random.default_rng(seed).integers(0, 256, length * width, dtype=np.uint8)
    return (raw & 1 if dtype == "bool" else raw).view(dtypes.numpy_dtype(dtype))


def take_array(array, **options):
    return take(array.ctypes.data, array.size, array.dtype.name, **options)


def line_of(text):
    return json.loads(b"{" + text + b"}")


def bag_of(array):
    return int(line_of(take_array(array)[0])["bag"], 16)


def without_sums(text):
    line = line_of(text)
    return {**line, "stats": {name: value for name, value in line["stats"].items() if name not in ("sum", "sumsq")}}


# ---- the JSON text of a record


def expected_text(summary):
    """Return the text that the record encoder writes."""
    stats, digest, bag = summary
    line = encode(Record(Key("x:out", 3), 7, "float32", (2, 3), stats=stats, hash=digest, bag=bag))
    return line[line.index(b'"hash"') : -1]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", dtypes.NAMES)
def test_record_summary_equals_the_python_line_on_both_backends(dtype, length):
    array = random_bits(dtype, length, seed=length)
    found = {}
    for name in kinds():
        with use_backend(name):
            found[name] = take_array(array)
            summary = summarize_array(array)
            assert found[name][0] == expected_text(summary)
            assert found[name][1] == bytes.fromhex(summary.hash) == digest_of(array.ctypes.data, array.nbytes)
    (text, digest), other = found["numpy"], found[backend()[0]]
    assert digest == other[1]
    assert without_sums(text) == without_sums(other[0])
    if array.dtype.kind in "iub" and array.itemsize < 4:  # sums are exact
        assert text == other[0]


def test_record_summary_line_parses(kind):
    array = np.linspace(-3, 5, 1000, dtype=np.float32)
    text = take_array(array)[0]
    line = json.loads(b'{"type":"record","seq":0,"site":"x:out","step":0,' + text + b"}")
    record = from_json(line, 0)
    assert (record.stats, record.hash, record.bag) == tuple(summarize_array(array))


def one_double(number):
    array = np.array([number], np.float64)
    return line_of(take_array(array)[0])["stats"], take_array(array)[0]


@needs_library
@settings(max_examples=400)
@given(st.integers(0, 2**64 - 1) | st.floats().map(lambda x: struct.unpack("<Q", struct.pack("<d", x))[0]))
def test_record_summary_writes_numbers_as_python(bits):
    (number,) = struct.unpack("<d", struct.pack("<Q", bits))
    with use_backend("c++"):
        text = one_double(number)[1]
    if math.isfinite(number):
        assert f'"min":{json.dumps(number + 0.0)},"max":'.encode() in text
    else:
        assert b'"min":null,"max":null,"absmax":null,"sum":0.0,"sumsq":0.0' in text


EDGES = [0.0, 5.0, -5.0, 0.1, 1e15, 1e16, 123456789012345680.0, 1e22, 1e23, 2e23, 9007199254740993.0, 0.0001, 0.00001]
EDGES += [1e-7, 1.5e-7, 5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, 9.5367431640625e-07, 1e100, 1e-100]
EDGES += [2.0**power for power in range(-1074, 1024, 7)] + [10.0**power for power in range(-30, 31)]


@pytest.mark.parametrize("sign", [1, -1])
def test_record_summary_writes_numbers_at_layout_boundaries_as_python(kind, sign):
    for number in EDGES:
        assert f'"min":{json.dumps(sign * number + 0.0)},'.encode() in one_double(sign * number)[1], number


def test_record_summary_overflowed_sums_are_null(kind):
    found, _ = one_double(1e200)
    assert (found["sum"], found["sumsq"]) == (1e200, None)
    array = np.full(3, 1.7e308)
    assert line_of(take_array(array)[0])["stats"]["sum"] is None


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_record_summary_rounds_wide_integers_as_float(kind, dtype):
    numbers = [2**53 + 1, 2**63 - 1, 2**53 - 1, 0] + ([-(2**63)] if dtype == "int64" else [2**64 - 1])
    array = np.array(numbers, dtype)
    stats = line_of(take_array(array)[0])["stats"]
    assert (stats["min"], stats["max"]) == (float(min(numbers)), float(max(numbers)))
    assert stats["absmax"] == max(abs(float(x)) for x in numbers)


def test_record_summary_refuses_an_unknown_dtype(kind):
    with pytest.raises(RunCorruptError, match="unknown dtype 'int4'"):
        take(0, 0, "int4")


# ---- copying


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
@pytest.mark.parametrize("dtype", dtypes.NAMES)
def test_record_summary_copy_writes_exactly_the_bytes(kind, dtype, offset):
    for length in (0, 1, 5, 2049, 9001):
        array = random_bits(dtype, length, seed=length)
        source = np.full(array.nbytes + 16, 0xA5, np.uint8)
        source[offset : offset + array.nbytes] = array.view(np.uint8)
        room = np.full(array.nbytes + 64, 0x5A, np.uint8)
        found = take(source.ctypes.data + offset, length, dtype, room.ctypes.data + offset)
        assert found == take_array(array)
        assert room[offset : offset + array.nbytes].tobytes() == array.tobytes()
        assert set(room[:offset]) | set(room[offset + array.nbytes :]) == {0x5A}


def test_record_summary_releases_the_gil_for_large_tensors(kind):
    array = np.random.default_rng(2).standard_normal(MIN_BYTES_WITHOUT_GIL // 4 + 5).astype(np.float32)
    room = np.empty_like(array)
    text, digest = take_array(array, target=room.ctypes.data)
    assert np.array_equal(room, array)
    assert digest == digest_of(array.ctypes.data, array.nbytes) == bytes.fromhex(summarize_array(array).hash)
    assert line_of(text)["stats"]["count"] == array.size


# ---- without the bag


@pytest.mark.parametrize("dtype", dtypes.NAMES)
def test_record_summary_without_the_multiset_hash_is_otherwise_equal(kind, dtype):
    array = random_bits(dtype, 3000, seed=4)
    (full, digest), bare = take_array(array), take_array(array, bag=False)
    assert bare[1] == digest
    assert line_of(bare[0]) == {name: value for name, value in line_of(full).items() if name != "bag"}


# ---- the bag, which is part of the run format

SIZED = ["uint8", "bool", "float8_e5m2", "int16", "bfloat16", "float32", "int32", "float64", "int64", "complex64"]


def plain_item(bits, width):
    """Compute the bag of one item by its definition in digests.py, with Python integers."""
    if width == 1:
        return mix64((bits + 1) * STEP)
    factor, shift = {2: (0x9E3B, 5), 4: (0x9E3779B1, 7), 8: (STEP, 7)}[width]
    mixed = bits * factor % 2 ** (8 * width)
    mixed ^= mixed >> shift
    pieces = struct.unpack(f"<{width // 2}h", mixed.to_bytes(width, "little"))
    return STEP + sum(s + 2**32 * s * s for s in pieces)


@settings(max_examples=80)
@given(st.binary(max_size=400), st.sampled_from(["uint8", "bfloat16", "float32", "float64", "complex64"]))
def test_multiset_hash_matches_its_definition(data, dtype):
    width = min(dtypes.itemsize(dtype), 4 if dtype == "complex64" else 8)
    array = np.frombuffer(data[: len(data) // 8 * 8], np.uint8).view(dtypes.numpy_dtype(dtype))
    raw = array.tobytes()
    items = [int.from_bytes(raw[i : i + width], "little") for i in range(0, len(raw), width)]
    want = sum(plain_item(bits, width) for bits in items) % 2**64
    for name in kinds():
        with use_backend(name):
            assert bag_of(array) == want


def test_multiset_hash_golden_values(kind):
    assert f"{bag_of(np.arange(10, dtype=np.float32)):016x}" == "c267d717f8e773ef"
    assert f"{bag_of(np.arange(256, dtype=np.uint8)):016x}" == "05bc6a4a6d369615"
    assert f"{bag_of(np.arange(9, dtype=np.float16)):016x}" == "21b72805799dd65d"
    assert f"{bag_of(np.arange(9, dtype=np.int64)):016x}" == "39bef76679a0e54c"


@settings(max_examples=80)
@given(st.data(), st.sampled_from(SIZED), st.integers(0, 6000))
def test_multiset_hash_is_permutation_invariant_and_additive(data, dtype, length):
    array = random_bits(dtype, length, seed=length)
    whole = bag_of(array)
    shuffled = array[np.random.default_rng(data.draw(st.integers(0, 99))).permutation(length)]
    assert bag_of(shuffled) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=4)))
    parts = [np.ascontiguousarray(part) for part in np.split(shuffled, cuts)]
    assert sum(map(bag_of, parts)) % 2**64 == whole


@settings(max_examples=40)
@given(st.data(), st.sampled_from(SIZED), st.integers(1, 6000))
def test_multiset_hash_detects_one_flipped_bit(data, dtype, length):
    array = random_bits(dtype, length, seed=length)
    before = bag_of(array)
    raw = array.view(np.uint8)
    bit = data.draw(st.integers(0, 7 if dtype != "bool" else 0))
    raw[data.draw(st.integers(0, raw.size - 1))] ^= np.uint8(1 << bit)
    assert bag_of(array) != before


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2"])
def test_multiset_hash_is_of_bits_not_values(kind, dtype):
    kind_ = dtypes.numpy_dtype(dtype)
    assert bag_of(np.array([0.0], kind_)) != bag_of(np.array([-0.0], kind_))
    bits = np.array([np.nan], kind_).view(f"u{kind_.itemsize}")
    assert bag_of(bits.view(kind_)) != bag_of((bits ^ 1).view(kind_))


@pytest.mark.parametrize("dtype", SIZED)
def test_multiset_hash_counts_zeros(kind, dtype):
    """The bag is independent of order but must detect zero padding."""
    assert len({bag_of(np.zeros(n, dtypes.numpy_dtype(dtype))) for n in range(70)}) == 70


NEIGHBOURS = {
    "small integers": np.arange(40, dtype=np.int32),
    "neighbours in float32": (0x3F800000 + np.arange(40, dtype=np.uint32)).view(np.float32),
    "bfloat16 held in float32": ((0x3F80 + np.arange(40, dtype=np.uint32)) << 16).view(np.float32),
    "integers held in float32": np.arange(40, dtype=np.float32),
    "neighbours in bfloat16": 0x3F80 + np.arange(40, dtype=np.uint16),
    "integers held in float16": np.arange(40, dtype=np.float16),
    "integers held in float64": np.arange(40, dtype=np.float64),
    "positions": np.arange(40, dtype=np.int64),
}


@pytest.mark.parametrize("values", NEIGHBOURS.values(), ids=NEIGHBOURS.keys())
def test_multiset_hash_has_no_collision_among_small_multisets(values):
    """Every multiset of four values out of forty; equal sums and equal sums of squares are common among them."""
    items = np.array([partial_bag(values[i : i + 1]) for i in range(values.size)], np.uint64)
    a, b, c, d = np.indices((40, 40, 40, 40)).reshape(4, -1)
    keep = (a <= b) & (b <= c) & (c <= d)
    bags = items[a[keep]] + items[b[keep]] + items[c[keep]] + items[d[keep]]
    assert np.unique(bags).size == bags.size
