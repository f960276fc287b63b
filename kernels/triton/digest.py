"""Device functions for the hash and bag of a tensor; kernels/native/digests.py defines both.

The hash is a sum over blocks of 8 KiB and the bag a sum over elements, so programs may process blocks in any order.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_BYTES = 8 * 1024
"""Bytes in a block of the hash."""
WORDS = tl.constexpr(BLOCK_BYTES // 8)
STEP = tl.constexpr(0x9E3779B97F4A7C15)
"""Increment of splitmix64 (the golden-ratio constant)."""
_OTHER = tl.constexpr(0xD6E8FEB86659FD93)
_MASK = (1 << 64) - 1


@functools.lru_cache(maxsize=16)
def keys_on(device: torch.device) -> Tensor:
    """Return the key of the hash as a [1032] int64 tensor on ``device``, cached per device."""
    return torch.tensor([_signed(_mix64_of_int(j * STEP.value)) for j in range(1, 1033)], device=device)


def _mix64_of_int(value: int) -> int:
    """Apply the splitmix64 finalizer to a Python integer."""
    value &= _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


@triton.jit
def mix64(z):
    """Apply the splitmix64 finalizer to uint64 values."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def product(word, key):
    """Return the NH product of 64-bit words and keys: (word.low + key.low) * (word.high + key.high), in uint64.

    The 32-bit sums wrap modulo 2^32.
    """
    low = (word.to(tl.uint32) + key.to(tl.uint32)).to(tl.uint64)
    return low * ((word >> 32).to(tl.uint32) + (key >> 32).to(tl.uint32)).to(tl.uint64)


@triton.jit
def trimmed(words, index, nbytes):
    """Return ``words`` with the bytes past the end of the tensor (``nbytes``) zeroed."""
    left = tl.minimum(tl.maximum(nbytes - 8 * index, 1), 8)
    return words & (0xFFFFFFFFFFFFFFFF >> (64 - 8 * left).to(tl.uint64))


@triton.jit
def keys_at(keys, place):
    """Load the two keys (uint64) of the words at offset ``place`` within their block."""
    one, two = tl.load(keys + place), tl.load(keys + 8 + place)
    return one.to(tl.uint64, bitcast=True), two.to(tl.uint64, bitcast=True)


@triton.jit
def block_hash(one, two, number, blocks):
    """Return the terms that blocks add to the two sums of the hash, 0 for indices from ``blocks`` on.

    ``one`` and ``two`` are the blocks' sums of products, ``number`` their indices.
    """
    order = (number + 1).to(tl.uint64)
    valid = number < blocks
    one, two = mix64(one + order * STEP), mix64(two + order * _OTHER)
    return tl.where(valid, one, 0), tl.where(valid, two, 0)


@triton.jit
def bag_item(bits, BITS: tl.constexpr):
    """Return the term that an element adds to the bag, without the STEP that every element of 16 or more bits adds."""
    if BITS == 8:
        return mix64((bits.to(tl.uint64) + 1) * STEP)
    elif BITS == 16:
        z = (bits * 0x9E3B) & 0xFFFF
        return _pieces((z ^ (z >> 5)).to(tl.uint64), 1)
    elif BITS == 32:
        z = bits.to(tl.uint32, bitcast=True) * 0x9E3779B1
        return _pieces((z ^ (z >> 7)).to(tl.uint64), 2)
    else:
        z = bits.to(tl.uint64, bitcast=True) * STEP
        return _pieces(z ^ (z >> 7), 4)


@triton.jit
def _pieces(z, COUNT: tl.constexpr):
    """Return the sum of ``s + 2^32 s^2`` over the COUNT signed 16-bit pieces ``s`` of ``z``."""
    total = tl.zeros_like(z)
    for k in tl.static_range(COUNT):
        s = ((z >> (16 * k)) & 0xFFFF).to(tl.int32)
        s = (s ^ 0x8000) - 0x8000
        total += s.to(tl.int64).to(tl.uint64, bitcast=True) + ((s * s).to(tl.uint64) << 32)
    return total
