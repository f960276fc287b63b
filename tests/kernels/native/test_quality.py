"""Quality of the hash: no collisions over many structured inputs, and a flipped bit flips half of the output bits."""

import itertools

import numpy as np
import pytest
from native_helpers import BACKENDS

from tapscope.kernels.native import digest_of, use_backend

BLOCK = 8192


@pytest.fixture(params=BACKENDS)
def kind(request):
    with use_backend(request.param):
        yield request.param


def digest(array):
    array = np.ascontiguousarray(array)
    return digest_of(array.ctypes.data, array.nbytes)


def all_differ(digests, at_least):
    """Check that all digests differ, and also their halves, because one half could hide a defect of the other."""
    digests = list(digests)
    assert len(digests) >= at_least
    assert len(set(digests)) == len(digests)
    for half in (slice(8), slice(8, 16)):
        assert len({d[half] for d in digests}) == len(digests)


def smooth(count, seed=0):
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def one_changed(base, change):
    """Yield the digest of ``base``, then the digest after changing each element in turn."""
    work = base.copy()
    yield digest(work)
    for i in range(work.size):
        work[i] = change(base[i])
        yield digest(work)
        work[i] = base[i]


BASES = {
    "normal": smooth(4500),
    "zeros": np.zeros(4500, np.float32),
    "ones": np.ones(4500, np.float32),
    "ramp": np.arange(4500, dtype=np.float32),
}
CHANGES = {
    "one ulp": lambda x: np.nextafter(x, np.float32(np.inf)),
    "sign": lambda x: -x,
    "twice and one": lambda x: 2 * x + 1,
}


@pytest.mark.parametrize("base", BASES.values(), ids=BASES.keys())
def test_hash_detects_one_changed_element_at_every_position(base):
    found = itertools.chain.from_iterable(
        itertools.islice(one_changed(base, change), 0 if n == 0 else 1, None)
        for n, change in enumerate(CHANGES.values())
    )
    all_differ(found, 3 * base.size + 1)


def test_hash_detects_one_changed_bfloat16_at_every_position():
    bits = smooth(9000).view(np.uint32) >> 16
    all_differ(one_changed(bits.astype(np.uint16), lambda x: x + np.uint16(1)), 9001)


def test_hash_detects_every_flipped_bit_of_a_page():
    raw = smooth(512).view(np.uint64)

    def flipped():
        for word in range(raw.size):
            for bit in range(64):
                raw[word] ^= np.uint64(1 << bit)
                yield digest(raw)
                raw[word] ^= np.uint64(1 << bit)

    all_differ(itertools.chain([digest(raw)], flipped()), 16385)


def swapped(base, pairs):
    """Yield the digest of ``base``, then the digest after each swap along the first axis by itself."""
    work = base.copy()
    yield digest(work)
    for i, j in pairs:
        work[[i, j]] = work[[j, i]]
        yield digest(work)
        work[[i, j]] = work[[j, i]]


WORDS = {"ramp": np.arange(6000, dtype=np.int64), "random": np.random.default_rng(1).integers(0, 2**63, 6000)}


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS.keys())
def test_hash_detects_words_swapped_over_every_distance(words):
    pairs = [(start, start + d) for start in (0, 5, 1017) for d in range(1, 4900)]
    all_differ(swapped(words, pairs), 14698)


@pytest.mark.parametrize("width", [2, 64, 512, 2048])
def test_hash_detects_swapped_rows(width):
    rows = smooth(160 * width).reshape(160, width)
    pairs = list(itertools.combinations(range(160), 2))[:: max(1, width // 128)]
    all_differ(swapped(rows, pairs), 790)


def test_hash_detects_swapped_heads():
    heads = smooth(64 * 16 * 32).reshape(64, 16, 32)
    found = [digest(heads[:, order]) for order in itertools.islice(itertools.permutations(range(16)), 3000)]
    all_differ(found, 3000)


def test_hash_detects_swapped_blocks():
    """The hash includes the block index for this case."""
    blocks = smooth(40 * BLOCK // 4).reshape(40, -1)
    all_differ(swapped(blocks, list(itertools.combinations(range(40), 2))), 781)


def test_hash_distinguishes_lengths_of_one_value(kind):
    """Zeros and other constants, up to and across a block boundary."""
    lengths = [*range(1, 700), *range(BLOCK - 300, BLOCK + 300), *range(3 * BLOCK - 9, 3 * BLOCK + 9)]
    fills = [0, 1, 0x7F, 0x80, 0xFF]
    rooms = [np.full(4 * BLOCK, fill, np.uint8) for fill in fills]
    all_differ((digest(room[:n]) for room in rooms for n in lengths), 6500)


def test_hash_distinguishes_sizes_of_zeros():
    zeros = np.zeros(20 * BLOCK, np.uint8)
    all_differ((digest(zeros[:n]) for n in range(0, 20 * BLOCK, 8)), 20480)


def test_hash_distinguishes_constants():
    all_differ((digest(np.full(3000, value, np.float32)) for value in np.arange(10000, dtype=np.float32)), 10000)


def test_hash_detects_shifts_by_one_word():
    words = np.random.default_rng(3).integers(0, 2**63, 9000)
    one_hot = np.zeros(9000, np.int64)
    one_hot[0] = 1
    found = [digest(words[n : n + 3000]) for n in range(5000)] + [digest(np.roll(one_hot, n)) for n in range(9000)]
    all_differ(found + [digest(np.roll(words, n)) for n in range(1, 3000)], 16999)


def test_hash_distinguishes_permutations_of_integers():
    rng = np.random.default_rng(4)
    for size in (8, 100, 3000):
        orders = {rng.permutation(size).tobytes() for _ in range(4000)}
        orders |= {np.roll(np.arange(size), n).tobytes() for n in range(size)}
        orders |= {(np.arange(size) * n % size).tobytes() for n in range(size) if np.gcd(n, size) == 1}
        for dtype in (np.int64, np.int32):
            all_differ((digest(np.frombuffer(o, np.int64).astype(dtype)) for o in orders), min(3500, 40 * size))


def test_hash_detects_two_changed_positions_or_token_ids():
    """For small integers, the high halves of the 64-bit words are zero."""
    base = np.arange(40, dtype=np.int64)

    def changed():
        for i, j in itertools.combinations(range(40), 2):
            for a, b in itertools.product((-3, -1, 1, 2, 65536), repeat=2):
                work = base.copy()
                work[i] += a
                work[j] += b
                yield work.tobytes()

    distinct = set(changed())
    all_differ((digest(np.frombuffer(one, np.int64)) for one in distinct), 15000)


@pytest.mark.parametrize("values", [np.zeros(1500, np.uint64), smooth(3000).view(np.uint64)], ids=["zeros", "normal"])
def test_hash_has_avalanche(values):
    """Checks every output bit over 4096 single-bit changes; a fair coin deviates by 0.008, a fifth of the bound."""
    before = np.frombuffer(digest(values), np.uint8)
    places = np.random.default_rng(5).choice(values.size * 64, 4096, replace=False)
    moved = np.zeros(128)
    each = []
    for place in places:
        work = values.copy()
        work[place // 64] ^= np.uint64(1 << int(place % 64))
        bits = np.unpackbits(np.frombuffer(digest(work), np.uint8) ^ before)
        moved += bits
        each.append(bits.sum())
    assert np.abs(moved / len(places) - 0.5).max() < 0.04
    assert 62 < np.mean(each) < 66
    assert min(each) > 30
