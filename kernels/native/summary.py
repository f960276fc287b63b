"""Statistics and the 128-bit hash of one tensor, in one pass over its bytes.

**The hash** (part of the run format) is defined on the tensor's bytes in C order, whatever its dtype and shape.
They are read as 64-bit little-endian words ``w[0..n)``, the last one zero-extended. All arithmetic is modulo 2^64::

    mix64(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31
    round(m):  m *= 0xD6E8FEB86659FD93;  m ^= m >> 32
    m[i] = mix64(w[i] + (i + 1) * 0x9E3779B97F4A7C15)
    h1   = mix64(nbytes + sum of m[i])
    h2   = mix64(nbytes + sum of round(m[i]))
    hash = h1 as 16 hex digits, then h2 as 16 hex digits, lower case

``mix64`` and the increment are those of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
generators, 2014). The index enters each word before it is mixed, so order matters; the sums make any split into
blocks, in any order and on any device, give the same hash. It finds accidents, it does not resist an attacker.
"""

import ctypes
import struct
import threading
from typing import Any, NamedTuple

import numpy as np

from tapscope import dtypes
from tapscope.kernels.native import library
from tapscope.record import Stats

Array = np.ndarray[Any, Any]

CHUNK = 65536
"""Elements that the numpy backend converts at a time; a multiple of 8, so that words never straddle chunks."""

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_MIX_A, _MIX_B, _ROUND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93


class Summary(NamedTuple):
    """What is known of a tensor without keeping it."""

    stats: Stats
    """A complex number counts as two elements; 64-bit integers are rounded to float64 in extremes and sums."""
    hash: str
    """32 hex digits; see the module's docstring."""


_LAYOUT = struct.Struct("=7q5d2Q")  # struct Summary in stats.cpp
_CODES = {name: (code, 1) for name, code in library.CODES.items()} | {"complex64": (library.CODES["float32"], 2)}


class _Scratch(threading.local):
    """One result buffer a thread, so that a call allocates nothing."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(_LAYOUT.size)
        self.address = ctypes.addressof(self.buffer)


_scratch = _Scratch()


def summarize(address: int, count: int, dtype: str) -> Summary:
    """Summarise ``count`` neighbouring elements at ``address``, which need not be aligned.

    ``dtype`` is a name of :data:`tapscope.dtypes.NAMES`; a complex64 is taken as two float32. The memory must stay
    alive and unchanged during the call. The GIL is released. Raises RunCorruptError for an unknown dtype.
    """
    functions = library.functions()
    if functions is None or dtype not in _CODES:
        return summarize_reference(_view(address, count, dtype))
    code, parts = _CODES[dtype]
    scratch = _scratch
    functions.summarize(address, count * parts, code, scratch.address)
    values = _LAYOUT.unpack_from(scratch.buffer)
    total, nan, posinf, neginf, zeros, subnormals, finite, low, high, absmax, added, squares, h1, h2 = values
    text = f"{h1:016x}{h2:016x}"
    if not finite:
        low = high = absmax = None
    return Summary(Stats(total, nan, posinf, neginf, zeros, subnormals, low, high, absmax, added, squares), text)


def summarize_array(array: Array) -> Summary:
    """Summarise a C-contiguous numpy array of any supported dtype; raises as :func:`summarize`, and ValueError."""
    if not (array.flags.c_contiguous and array.dtype.isnative):
        raise ValueError(f"array of shape {array.shape} must be C-contiguous and native; use np.ascontiguousarray")
    return summarize(array.ctypes.data, array.size, array.dtype.name)


class _Memory:
    """Borrowed bytes that numpy can look at."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, True)}


def _view(address: int, count: int, dtype: str) -> Array:
    kind = dtypes.numpy_dtype(dtype)
    if not count:
        return np.empty(0, kind)
    return np.asarray(_Memory(address, count * kind.itemsize)).view(kind)


# ---- the plain reference, which also serves where no library was built


class _Format(NamedTuple):
    """A floating format by its bits without the sign."""

    bits: Any
    nonfinite: int
    """Smallest magnitude that is infinite or NaN."""
    infinity: int | None
    min_normal: int


_FORMATS = {
    "float64": _Format(np.uint64, 0x7FF << 52, 0x7FF << 52, 1 << 52),
    "float32": _Format(np.uint32, 0x7F800000, 0x7F800000, 1 << 23),
    "float16": _Format(np.uint16, 0x7C00, 0x7C00, 1 << 10),
    "bfloat16": _Format(np.uint16, 0x7F80, 0x7F80, 1 << 7),
    "float8_e4m3fn": _Format(np.uint8, 0x7F, None, 1 << 3),
    "float8_e5m2": _Format(np.uint8, 0x7C, 0x7C, 1 << 2),
}


def summarize_reference(array: Array, chunk: int = CHUNK) -> Summary:
    """The same in numpy, ``chunk`` elements (a multiple of 8) at a time, so that temporaries stay small."""
    flat = array.reshape(-1)
    if flat.dtype == np.complex64:
        flat = flat.view(np.float32)
    h1 = h2 = first = 0
    parts = []
    for start in range(0, flat.size, chunk):
        block = flat[start : start + chunk]
        words = _words(block)
        parts.append(_statistics(block))
        one, two = partial_hash(words, first)
        h1, h2, first = h1 + one, h2 + two, first + words.size
    nbytes = flat.size * flat.itemsize
    text = f"{_mix64(h1 + nbytes):016x}{_mix64(h2 + nbytes):016x}"
    nan, positive, negative, zeros, tiny = (sum(part[0][i] for part in parts) for i in range(5))
    extremes = [part[1] for part in parts if part[1] is not None]
    added, squares = (float(sum(part[2][i] for part in parts)) for i in range(2))
    low, high = min((pair[0] for pair in extremes), default=None), max((pair[1] for pair in extremes), default=None)
    most = None if low is None or high is None else max(abs(low), abs(high))
    return Summary(Stats(flat.size, nan, positive, negative, zeros, tiny, low, high, most, added, squares), text)


def _statistics(block: Array) -> tuple[tuple[int, ...], tuple[float, float] | None, tuple[float, float]]:
    """(nan, posinf, neginf, zeros, subnormals), (min, max) or None, (sum, sum of squares)."""
    form = _FORMATS.get(block.dtype.name)
    if form is None:
        finite = block
        counts = (0, 0, 0, int(np.count_nonzero(block == 0)), 0)
    else:
        bits = block.view(form.bits)
        sign = form.bits(1 << (8 * block.itemsize - 1))
        magnitude = bits & ~sign
        infinite = magnitude == form.bits(form.infinity) if form.infinity is not None else np.zeros(bits.shape, bool)
        usable = magnitude < form.bits(form.nonfinite)
        negative = int(np.count_nonzero(infinite & (bits >= sign)))
        positive = int(np.count_nonzero(infinite)) - negative
        zeros = int(np.count_nonzero(magnitude == 0))
        tiny = int(np.count_nonzero(magnitude < form.bits(form.min_normal)))
        nan = int(np.count_nonzero(~usable)) - positive - negative
        counts = (nan, positive, negative, zeros, tiny - zeros)
        finite = block[usable]
    if not finite.size:
        return counts, None, (0.0, 0.0)
    values = finite.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # float64 itself may overflow
        sums = (float(values.sum()), float((values * values).sum()))
    return counts, (float(values.min()), float(values.max())), sums


def _words(block: Array) -> Array:
    raw = block.view(np.uint8)
    tail = -raw.size % 8
    return (np.concatenate([raw, np.zeros(tail, np.uint8)]) if tail else raw).view(np.dtype("<u8"))


def partial_hash(words: Array, first: int) -> tuple[int, int]:
    """Both sums over ``words`` (uint64), the first of which has index ``first`` in its tensor; mod 2^64."""
    index = np.arange(first + 1, first + 1 + words.size, dtype=np.uint64)
    mixed = words + index * np.uint64(_STEP)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_MIX_A)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX_B)
    mixed ^= mixed >> np.uint64(31)
    again = mixed * np.uint64(_ROUND)
    again ^= again >> np.uint64(32)
    return int(mixed.sum(dtype=np.uint64)), int(again.sum(dtype=np.uint64))


def _mix64(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_A) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_B) & _MASK
    return value ^ (value >> 31)
