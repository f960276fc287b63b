"""The two digests of the run format, defined here and computed in numpy: ``hash`` over bytes, ``bag`` over elements.

**The hash** is defined on the tensor's bytes in C order, whatever its dtype and shape. They are read as 64-bit
little-endian words ``w[0..n)``, the last one zero-extended. All arithmetic is modulo 2^64::

    mix64(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31
    round(m):  m *= 0xD6E8FEB86659FD93;  m ^= m >> 32
    m[i] = mix64(w[i] + (i + 1) * 0x9E3779B97F4A7C15)
    h1   = mix64(nbytes + sum of m[i])
    h2   = mix64(nbytes + sum of round(m[i]))
    hash = h1 as 16 hex digits, then h2 as 16 hex digits, lower case

``mix64`` and the increment are those of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
generators, 2014). The index enters each word before it is mixed, so order matters; the sums make any split into
blocks, in any order and on any device, give the same hash. It finds accidents, it does not resist an attacker.

**The bag** is a sum over the elements, modulo 2^64, of a number that depends on the element's bits alone; a complex
number is two elements. For an element ``x`` of ``b`` bits::

    b = 8:        item(x) = mix64((x + 1) * 0x9E3779B97F4A7C15)
    b = 16:       z = x * 0x9E3B              mod 2^16;  z ^= z >> 5
    b = 32:       z = x * 0x9E3779B1          mod 2^32;  z ^= z >> 7
    b = 64:       z = x * 0x9E3779B97F4A7C15  mod 2^64;  z ^= z >> 7
    16, 32, 64:   item(x) = 0x9E3779B97F4A7C15 + sum of (s + 2^32 * s * s)
                  over the b / 16 pieces s of z, read as signed 16-bit integers
    bag  = (sum of item(x)) as 16 hex digits, lower case

Any order of the elements gives the same bag, and the bag of a whole is the sum of the bags of its parts, however it
was cut. Bits are bits: -0 differs from 0, and one NaN from another. It only proposes: equal bags with different
hashes mean that the elements were permuted, never that two tensors are the same.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
_MIX_A, _MIX_B, _ROUND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93
_SPREAD = {2: (np.uint16, 0x9E3B, 5), 4: (np.uint32, 0x9E3779B1, 7), 8: (np.uint64, STEP, 7)}


def mix64(value: int) -> int:
    """The finaliser of splitmix64."""
    value &= MASK
    value = ((value ^ (value >> 30)) * _MIX_A) & MASK
    value = ((value ^ (value >> 27)) * _MIX_B) & MASK
    return value ^ (value >> 31)


def partial_hash(words: Array, first: int) -> tuple[int, int]:
    """Both sums over ``words`` (uint64), the first of which has index ``first`` in its tensor; mod 2^64."""
    index = np.arange(first + 1, first + 1 + words.size, dtype=np.uint64)
    mixed = words + index * np.uint64(STEP)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_MIX_A)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX_B)
    mixed ^= mixed >> np.uint64(31)
    again = mixed * np.uint64(_ROUND)
    again ^= again >> np.uint64(32)
    return int(mixed.sum(dtype=np.uint64)), int(again.sum(dtype=np.uint64))


def finish_hash(h1: int, h2: int, nbytes: int) -> bytes:
    """The 16 bytes of the hash, from the sums over all words."""
    return mix64(h1 + nbytes).to_bytes(8) + mix64(h2 + nbytes).to_bytes(8)


_BYTE_ITEMS = np.array([mix64((code + 1) * STEP) for code in range(256)], np.uint64)


def partial_bag(block: Array) -> int:
    """The bag of the elements of ``block``, which is no complex array; an integer mod 2^64."""
    if block.itemsize == 1:
        return int(_BYTE_ITEMS[block.view(np.uint8)].sum(dtype=np.uint64))
    kind, factor, shift = _SPREAD[block.itemsize]
    spread = block.view(kind) * kind(factor)
    spread ^= spread >> kind(shift)
    pieces = spread.view(np.int16).astype(np.int64)
    low, high = int(pieces.sum()), int((pieces * pieces).sum())
    return (block.size * STEP + low + (high << 32)) & MASK
