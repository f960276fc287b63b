"""Tensor summary in numpy: the reference for the C++ kernels, and the fallback where no library was built.

Counts, extremes, hash and bag match the C++ library bit for bit; sums agree to float32 block precision.
"""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tapscope.kernels.native.digests import BLOCK, finish_hash, partial_bag, partial_hash
from tapscope.run_format.record import Key, Record, Stats, encode

Array = np.ndarray[Any, Any]

CHUNK = 65536
"""Elements converted at a time; a multiple of 8192, so that no hash block straddles chunks."""


class Summary(NamedTuple):
    """Statistics and hashes of a tensor."""

    stats: Stats
    """A complex element counts as two; 64-bit integers are rounded to float64 in extremes and sums."""
    hash: str
    """32 hex digits over the bytes in C order; see :mod:`tapscope.kernels.native.digests`."""
    bag: str | None
    """16 hex digits over the elements in any order; see :mod:`tapscope.kernels.native.digests`. None if not requested.
    """


class _Format(NamedTuple):
    """Bit layout of a floating-point format, without the sign bit."""

    bits: Any
    nonfinite: int
    """Magnitude bits of infinity; larger ones are NaN."""
    min_normal: int


_FORMATS = {
    "float64": _Format(np.uint64, 0x7FF << 52, 1 << 52),
    "float32": _Format(np.uint32, 0x7F800000, 1 << 23),
    "float16": _Format(np.uint16, 0x7C00, 1 << 10),
    "bfloat16": _Format(np.uint16, 0x7F80, 1 << 7),
}


def summarize_reference(array: Array, chunk: int = CHUNK) -> Summary:
    """Summarize ``array`` in chunks of ``chunk`` elements (a multiple of 8192), to bound temporaries."""
    flat = array.reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(flat.real.dtype)
    h1 = h2 = bag = 0
    parts = []
    for start in range(0, flat.size, chunk):
        block = flat[start : start + chunk]
        parts.append(_statistics(block))
        one, two = partial_hash(to_words(block), start * flat.itemsize // BLOCK)
        h1, h2 = h1 + one, h2 + two
        bag += partial_bag(block)
    digest = finish_hash(h1, h2, flat.size * flat.itemsize)
    return Summary(_merge(flat.size, parts), digest.hex(), f"{bag % 2**64:016x}")


def text_of(summary: Summary) -> bytes:
    """Return the JSON fields of a record line that ``summary`` provides, cut from an otherwise empty record."""
    stats, digest, bag = summary
    line = encode(Record(Key("", 0), 0, None, (), stats=stats, hash=digest, bag=bag))
    return line[line.index(b'"hash"') : -1]


def to_words(block: Array) -> Array:
    """Return the bytes of ``block`` as uint64, the last word zero-extended."""
    raw = block.view(np.uint8)
    tail = -raw.size % 8
    return (np.concatenate([raw, np.zeros(tail, np.uint8)]) if tail else raw).view(np.dtype("<u8"))


_Part = tuple[tuple[int, ...], tuple[float, float] | None, tuple[float, float]]


def _merge(count: int, parts: list[_Part]) -> Stats:
    nan, positive, negative, zeros, tiny = (sum(part[0][i] for part in parts) for i in range(5))
    extremes = [part[1] for part in parts if part[1] is not None]
    added, squares = (sum((part[2][i] for part in parts), 0.0) + 0.0 for i in range(2))
    if not extremes:
        return Stats(count, nan, positive, negative, zeros, tiny, None, None, None, added, squares)
    low, high = min(pair[0] for pair in extremes) + 0.0, max(pair[1] for pair in extremes) + 0.0  # -0.0 becomes 0.0
    return Stats(count, nan, positive, negative, zeros, tiny, low, high, max(abs(low), abs(high)), added, squares)


def _statistics(block: Array) -> _Part:
    """Return (nan, posinf, neginf, zeros, subnormals), (min, max) or None, (sum, sum of squares)."""
    if block.dtype.name in _FORMATS:
        counts, usable = _classify_bits(block, _FORMATS[block.dtype.name])
        values = block[usable].astype(np.float64)
    elif block.dtype.kind in "iub":
        counts, values = (0, 0, 0, int(np.count_nonzero(block == 0)), 0), block.astype(np.float64)
    else:
        counts, values = _classify_bytes(block)
    if not values.size:
        return counts, None, (0.0, 0.0)
    with np.errstate(over="ignore", invalid="ignore"):  # float64 itself may overflow
        sums = (float(values.sum()), float((values * values).sum()))
    return counts, (float(values.min()), float(values.max())), sums


def _classify_bits(block: Array, form: _Format) -> tuple[tuple[int, ...], Array]:
    """Return the counts and a mask of finite elements, from the bits alone, so that no signaling NaN is converted."""
    bits = block.view(form.bits)
    sign = form.bits(1 << (8 * block.itemsize - 1))
    magnitude, limit = bits & ~sign, form.bits(form.nonfinite)
    infinite = magnitude == limit
    negative = int(np.count_nonzero(infinite & (bits >= sign)))
    positive = int(np.count_nonzero(infinite)) - negative
    zeros = int(np.count_nonzero(magnitude == 0))
    tiny = int(np.count_nonzero(magnitude < form.bits(form.min_normal)))
    return (int(np.count_nonzero(magnitude > limit)), positive, negative, zeros, tiny - zeros), magnitude < limit


def _classify_bytes(block: Array) -> tuple[tuple[int, ...], Array]:
    """Return the counts and the finite values of an 8-bit floating-point block."""
    with np.errstate(invalid="ignore"):
        values = block.astype(np.float64)
    finite = values[np.isfinite(values)]
    smallest = float(ml_dtypes.finfo(block.dtype).smallest_normal)
    zeros = int(np.count_nonzero(finite == 0))
    tiny = int(np.count_nonzero(np.abs(finite) < smallest)) - zeros
    infinite = (int(np.count_nonzero(values == sign * np.inf)) for sign in (1, -1))
    return (int(np.count_nonzero(np.isnan(values))), *infinite, zeros, tiny), finite
