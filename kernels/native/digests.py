"""The two digests of the run format, defined here and computed in numpy: ``hash`` over bytes, ``bag`` over elements.

**The hash** is defined on the tensor's bytes in C order, whatever its dtype and shape. The bytes are read as 64-bit
little-endian words ``w[0..n)``, the last one zero-extended. All arithmetic is modulo 2^64::

    mix64(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31
    key[j] = mix64((j + 1) * 0x9E3779B97F4A7C15)                                       for j in 0..1031
    product(w, k) = (low(w) + low(k) mod 2^32) * (high(w) + high(k) mod 2^32)          of the halves, 32 bits each
    one[b] = sum of product(w[1024 b + j], key[j])        over the words of block b:
    two[b] = sum of product(w[1024 b + j], key[j + 8])    j in 0..1023, fewer in the last block
    h1   = mix64(nbytes + sum over b of mix64(one[b] + (b + 1) * 0x9E3779B97F4A7C15))
    h2   = mix64(nbytes + sum over b of mix64(two[b] + (b + 1) * 0xD6E8FEB86659FD93))
    hash = h1 as 16 hex digits, then h2 as 16 hex digits, lower case

The sums of products are NH (Black, Halevi, Krawczyk, Krovetz, Rogaway: UMAC: fast and secure message authentication,
1999). Under a random key, two different blocks collide in one sum with a probability of at most 2^-32; the second sum
uses the same key shifted by 8 words, and both sums collide with at most 2^-64. The key here is fixed, and ``mix64`` and
the increment are those of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014). The
hash therefore detects accidental changes but does not resist an attacker. This strength needs all 128 bits; do not
truncate them.

Blocks may be hashed in any order and on any device. A tensor may be split at any block boundary: sums over the parts
add up to the sums over the whole.

**The bag** is a sum over the elements, modulo 2^64, of a number that depends only on the element's bits; a complex
element counts as two. For an element ``x`` of ``b`` bits::

    b = 8:        item(x) = mix64((x + 1) * 0x9E3779B97F4A7C15)
    b = 16:       z = x * 0x9E3B              mod 2^16;  z ^= z >> 5
    b = 32:       z = x * 0x9E3779B1          mod 2^32;  z ^= z >> 7
    b = 64:       z = x * 0x9E3779B97F4A7C15  mod 2^64;  z ^= z >> 7
    16, 32, 64:   item(x) = 0x9E3779B97F4A7C15 + sum of (s + 2^32 * s * s)
                  over the b / 16 pieces s of z, read as signed 16-bit integers
    bag  = (sum of item(x)) as 16 hex digits, lower case

Any order of the elements gives the same bag, and the bag of a tensor is the sum of the bags of its parts, however it is
split. Elements are compared by bits: -0 differs from 0, and NaNs with different payloads differ. Equal bags with
different hashes mean that the elements were permuted; equal bags alone never prove that two tensors are equal.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
BLOCK = 8192
"""Bytes per hash block."""

_WORDS, _KEY_SHIFT = BLOCK // 8, 8  # words per block; words by which the key of the second sum is shifted
_CHUNK_WORDS = 64 * _WORDS  # words processed at a time, to bound temporaries
_STEP_2 = 0xD6E8FEB86659FD93
_MIX_A, _MIX_B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MULTIPLIERS = {2: (np.uint16, 0x9E3B, 5), 4: (np.uint32, 0x9E3779B1, 7), 8: (np.uint64, STEP, 7)}


def mix64(value: int) -> int:
    """Apply the finalizer of splitmix64."""
    value &= MASK
    value = ((value ^ (value >> 30)) * _MIX_A) & MASK
    value = ((value ^ (value >> 27)) * _MIX_B) & MASK
    return value ^ (value >> 31)


def _key_halves() -> Array:
    """Return the key as 32-bit halves, [words, 2], low half first."""
    whole = np.array([mix64((i + 1) * STEP) for i in range(_WORDS + _KEY_SHIFT)], np.uint64)
    return np.stack([whole & np.uint64(0xFFFFFFFF), whole >> np.uint64(32)], axis=1).astype(np.uint32)


_KEY = _key_halves()


def partial_hash(words: Array, first: int) -> tuple[int, int]:
    """Return both hash sums over ``words`` (uint64), modulo 2^64.

    ``first`` is the index of the block of the tensor in which ``words`` starts.
    """
    one = two = 0
    for start in range(0, words.size, _CHUNK_WORDS):
        chunk, number = words[start : start + _CHUNK_WORDS], first + start // _WORDS
        whole = chunk.size // _WORDS
        for blocks in (chunk[: whole * _WORDS].reshape(-1, _WORDS), chunk[whole * _WORDS :].reshape(1, -1)):
            if blocks.size:
                sums = _mixed_blocks(blocks, number)
                one, two = one + sums[0], two + sums[1]
            number += whole
    return one & MASK, two & MASK


def _mixed_blocks(blocks: Array, first: int) -> tuple[int, int]:
    """Return both hash sums over blocks of shape [blocks, words]; ``first`` is the index of the first block."""
    halves = blocks.view("<u4").reshape(*blocks.shape, 2)  # low half first
    numbers = np.arange(first + 1, first + 1 + len(blocks), dtype=np.uint64)
    sums = []
    for shift, step in ((0, STEP), (_KEY_SHIFT, _STEP_2)):
        added = halves + _KEY[shift : shift + blocks.shape[1]]
        products = (added[..., 0].astype(np.uint64) * added[..., 1]).sum(axis=1, dtype=np.uint64)
        sums.append(int(_mix64_of(products + numbers * np.uint64(step)).sum(dtype=np.uint64)))
    return sums[0], sums[1]


def _mix64_of(values: Array) -> Array:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_A)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_B)
    mixed: Array = values ^ (values >> np.uint64(31))
    return mixed


def finish_hash(h1: int, h2: int, nbytes: int) -> bytes:
    """Return the 16 bytes of the hash, from the sums over all blocks."""
    return mix64(h1 + nbytes).to_bytes(8) + mix64(h2 + nbytes).to_bytes(8)


_BYTE_ITEMS = np.array([mix64((code + 1) * STEP) for code in range(256)], np.uint64)


def partial_bag(block: Array) -> int:
    """Return the bag of ``block``, which must not be complex, as an integer modulo 2^64."""
    if block.itemsize == 1:
        return int(_BYTE_ITEMS[block.view(np.uint8)].sum(dtype=np.uint64))
    kind, factor, shift = _MULTIPLIERS[block.itemsize]
    spread = block.view(kind) * kind(factor)
    spread ^= spread >> kind(shift)
    pieces = spread.view(np.int16).astype(np.int64)
    low, high = int(pieces.sum()), int((pieces * pieces).sum())
    return (block.size * STEP + low + (high << 32)) & MASK
