"""Counters of a sketch, see :mod:`tapscope.run_format.sketch`, computed from a tensor in host memory.

The element in column ``c`` of a row with key ``k`` (32 bits) is in block ``J = c >> 8``. All numbers are unsigned and
modulo 2^32; ``mix32`` is the finalizer of MurmurHash3:

    b     = mix32(k + J * 0x9E3779B1)
    w     = mix32(b ^ ((c & 31) + 1) * 0x85EBCA77)
    sign  = bit 24 + ((c >> 5) & 7) of w: 1 is negative
    place = (c & 255) ^ (b >> 24)

Columns of one block never share a counter; columns of different blocks or rows share one with probability 1/256. The
variance of the squared norm is therefore at most that of a count-sketch with independent buckets. Non-finite elements
count as zero.
"""

import ctypes
from typing import Any

import numpy as np

from tapscope.core import dtypes
from tapscope.kernels.native import library
from tapscope.run_format.sketch import COUNTERS, SketchIndex

Array = np.ndarray[Any, Any]

_NAMES = {dtypes.numpy_dtype(name): name for name in library.CODES}
_CHUNK = 1 << 20
"""Elements that the numpy reference reads at a time."""


def can_sketch(dtype: str) -> bool:
    """Return whether tensors of this dtype can be sketched."""
    return dtype in library.CODES and dtype not in dtypes.COMPLEX


def sketch(address: int, dtype: str, index: SketchIndex) -> Array:
    """Return the counters of a contiguous tensor at ``address``, [256] float32."""
    functions = library.functions()
    if functions is None or not len(index.rows):
        count = (int(index.rows.max()) + 1 if len(index.rows) else 0) * index.width
        kind = dtypes.numpy_dtype(dtype)
        if not count:
            return np.zeros(COUNTERS, np.float32)
        memory = (ctypes.c_ubyte * (count * kind.itemsize)).from_address(address)
        return sketch_reference(np.frombuffer(memoryview(memory), kind).reshape(-1, index.width), index)
    out = np.zeros(COUNTERS)
    rows, keys, runs = (
        np.ascontiguousarray(each, kind) for each, kind in zip(index[:3], (np.int64, np.uint32, np.int64), strict=True)
    )
    functions.sketch(address, library.CODES[dtype], index.width, rows, keys, runs, out)
    return out.astype(np.float32)


def sketch_of(values: Array, index: SketchIndex) -> Array:
    """Return the counters of an array, [256] float32."""
    values = np.ascontiguousarray(values)
    return sketch(values.ctypes.data, _NAMES[values.dtype], index)


def sketch_reference(values: Array, index: SketchIndex) -> Array:
    """Compute the counters of ``values`` [rows, columns] in numpy, [256] float32."""
    counters = np.zeros(COUNTERS)
    for first, column, count in index.runs.tolist():
        step = max(1, _CHUNK // max(count, 1))
        for at in range(0, len(index.rows), step):
            rows, keys = index.rows[at : at + step], index.keys[at : at + step]
            part = values[rows, first : first + count].astype(np.float64)
            columns = np.arange(column, column + count)
            places, signs = hashed(keys[:, None], columns[None])
            part = np.where(np.isfinite(part), part, 0.0) * signs
            counters += np.bincount(places.ravel(), part.ravel(), COUNTERS)
    return counters.astype(np.float32)


def hashed(keys: Array, columns: Array) -> tuple[Array, Array]:
    """Return (counter index, sign) of each element, from row keys (uint32) and columns, broadcast."""
    block = (columns >> 8).astype(np.uint32)
    mixed = _mix32(keys.astype(np.uint32) + block * np.uint32(0x9E3779B1))
    lane = (columns & 31).astype(np.uint32)
    word = _mix32(mixed ^ (lane + np.uint32(1)) * np.uint32(0x85EBCA77))
    negative = (word >> (np.uint32(24) + ((columns >> 5) & 7).astype(np.uint32))) & np.uint32(1)
    return (columns & 255) ^ (mixed >> np.uint32(24)).astype(np.int64), 1.0 - 2.0 * negative


def _mix32(h: Array) -> Array:
    h = (h ^ h >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    h = (h ^ h >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    mixed: Array = h ^ h >> np.uint32(16)
    return mixed
