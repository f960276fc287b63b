"""The digests of a tensor on the device; kernels/native/digests.py defines them.

The hash is a sum over blocks of 8 KiB and the bag a sum over elements, so that programs compute them in any order.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_BYTES = 8 * 1024
"""Of a block of the hash."""
WORDS = tl.constexpr(BLOCK_BYTES // 8)
STEP = tl.constexpr(0x9E3779B97F4A7C15)
"""Increment of splitmix64."""
_OTHER = tl.constexpr(0xD6E8FEB86659FD93)
_MASK = (1 << 64) - 1


@functools.lru_cache(maxsize=16)
def keys_on(device: torch.device) -> Tensor:
    """The key of the hash, [1032] int64 on ``device``."""
    return torch.tensor([_signed(_mix64_of_int(j * STEP.value)) for j in range(1, 1033)], device=device)


def _mix64_of_int(value: int) -> int:
    """The finaliser of splitmix64."""
    value &= _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


@triton.jit
def mix64(z):
    """The finaliser of splitmix64, of uint64 values."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def product(word, key):
    """The product of the hash: of the lower and the upper 32 bits of word + key."""
    low = (word.to(tl.uint32) + key.to(tl.uint32)).to(tl.uint64)
    return low * ((word >> 32).to(tl.uint32) + (key >> 32).to(tl.uint32)).to(tl.uint64)


@triton.jit
def trimmed(words, index, nbytes):
    """Words with the bytes after the last one of the tensor set to 0."""
    left = tl.minimum(tl.maximum(nbytes - 8 * index, 1), 8)
    return words & (0xFFFFFFFFFFFFFFFF >> (64 - 8 * left).to(tl.uint64))


@triton.jit
def keys_at(keys, place):
    """The two keys (uint64) of the words at ``place`` of their block."""
    one, two = tl.load(keys + place), tl.load(keys + 8 + place)
    return one.to(tl.uint64, bitcast=True), two.to(tl.uint64, bitcast=True)


@triton.jit
def block_hash(one, two, number, blocks):
    """What blocks add to the two sums of the hash: of their sums of products and ``number``; 0 beyond ``blocks``."""
    order = (number + 1).to(tl.uint64)
    real = number < blocks
    one, two = mix64(one + order * STEP), mix64(two + order * _OTHER)
    return tl.where(real, one, 0), tl.where(real, two, 0)


@triton.jit
def bag_item(bits, BITS: tl.constexpr):
    """What an element adds to the bag, without STEP, which all elements of 16 bits and more add."""
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
    """The sum of s + 2^32 s^2 over the pieces of 16 bits of ``z``, read as signed."""
    total = tl.zeros_like(z)
    for k in tl.static_range(COUNT):
        s = ((z >> (16 * k)) & 0xFFFF).to(tl.int32)
        s = (s ^ 0x8000) - 0x8000
        total += s.to(tl.int64).to(tl.uint64, bitcast=True) + ((s * s).to(tl.uint64) << 32)
    return total
