"""Sketch: 256 counters that summarize a tensor, from which the difference of two tensors can be estimated.

A count-sketch (Charikar, Chen and Farach-Colton, 2002; feature hashing, Weinberger et al., 2009): every element is
added, with a pseudo-random sign, to one pseudo-random counter. Sign and counter depend only on the element's token row
(request and position) and its column in the unsharded tensor, see :func:`row_key` and kernels/native/sketch.py. Hence

- sketches are linear: those of shards, partial sums and row ranges add up to the sketch of the whole tensor,
- equal values have equal sketches under any batching, chunking and sharding, up to rounding,
- the squared norm of the difference of two sketches estimates the squared norm of the difference of the tensors
  (Alon, Matias and Szegedy, 1996).

docs/reference/run-format.md is normative for the hash.
"""

import hashlib
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from tapscope.core.dims import Dim, parse
from tapscope.core.errors import DimsError
from tapscope.core.observe import StepInfo
from tapscope.run_format.record import COUNTERS as COUNTERS

Array = np.ndarray[Any, Any]

NBYTES = 4 * COUNTERS
"""Size of a stored sketch in bytes (float32 counters)."""
RESOLUTION = 1e-6
"""Smallest meaningful relative difference; smaller ones are rounding of the counters."""
_RELATIVE_SPREAD = 1.96 * math.sqrt(4.0 / COUNTERS)
LOW_FACTOR, HIGH_FACTOR = 1.0 / math.sqrt(1.0 + _RELATIVE_SPREAD), 1.0 / math.sqrt(1.0 - _RELATIVE_SPREAD)
"""Bounds of the 95 % confidence interval of an estimated error, relative to the error."""
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MAX_RUNS = 1 << 20


class RowKeys(NamedTuple):
    """Hash keys of the token rows of a step."""

    grid: tuple[int, ...]
    """Shape of the token axes, see :class:`tapscope.core.observe.StepInfo`."""
    keys: Array
    """[slots] uint32: hash key of each row of the flattened grid."""
    valid: Array
    """[slots] bool: False for padding rows, which sketches exclude."""


class SketchIndex(NamedTuple):
    """Mapping from the elements of a local tensor, viewed as [rows, columns], to positions in the unsharded tensor."""

    rows: Array
    """[n] int64: indices of the local rows, without padding rows."""
    keys: Array
    """[n] uint32: hash keys of these rows."""
    runs: Array
    """[m, 3] int64: (first local column, the corresponding column of the unsharded tensor, number of columns)."""
    width: int
    """Number of local columns."""
    by_rows: bool
    """Whether token rows are known; otherwise the tensor is treated as a single row with key 0."""


_MEMBER = b',"sketch":{"by_rows":%b,"crc32":%d}'


def record_member(by_rows: bool, counters: Any) -> bytes:
    """Return the ``sketch`` field of a record line for the bytes of its counters; see :attr:`SketchIndex.by_rows`."""
    return _MEMBER % (b"true" if by_rows else b"false", zlib.crc32(counters))


def members_of(counters: Iterable[Any]) -> list[bytes]:
    """Return the :func:`record_member` of each sketch; all are indexed by token rows."""
    return [_MEMBER % (b"true", crc) for crc in map(zlib.crc32, counters)]


def row_keys(info: StepInfo) -> RowKeys | None:
    """Compute the hash keys of the token rows of a step; None if the rows are unknown or exceed the grid."""
    if not info.grid or not info.rows:
        return None
    slots, rows = math.prod(info.grid), info.rows
    keys, valid = np.zeros(slots, np.uint32), np.zeros(slots, bool)
    hashes = np.array([request_hash(run.request) for run in rows], np.uint64)
    spans = np.array([(run.position, run.slot, run.count) for run in rows], np.int64).T
    positions, here, counts = spans
    if (counts != 1).any():
        later = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        positions, here = np.repeat(spans[:2], counts, axis=1) + later
        hashes = np.repeat(hashes, counts)
    if len(here) and here.max() >= slots:
        return None
    keys[here] = _row_keys(hashes, positions)
    valid[here] = True
    return RowKeys(tuple(info.grid), keys, valid)


def row_key(request: str, positions: Array) -> Array:
    """Compute the hash keys of token rows: the low half of mix64(h + position * 0x9E3779B97F4A7C15), [n] uint32.

    ``h`` is the :func:`request_hash`, ``positions`` is [n].
    """
    return _row_keys(np.uint64(request_hash(request)), positions)


def _row_keys(hashes: Any, positions: Array) -> Array:
    z = hashes + positions.astype(np.uint64) * _STEP
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    low: Array = (z ^ z >> np.uint64(31)).astype(np.uint32)
    return low


@lru_cache(maxsize=4096)
def request_hash(request: str) -> int:
    """Return the 8-byte BLAKE2b digest of a request id as a little-endian integer."""
    return int.from_bytes(hashlib.blake2b(request.encode(), digest_size=8).digest(), "little")


def sketch_index(
    shape: Sequence[int],
    step: RowKeys | None,
    *,
    dims: str | None = None,
    slots: Iterable[tuple[int, int]] | None = None,
    mesh: Mapping[str, int] | None = None,
    coords: Mapping[str, int] | None = None,
) -> SketchIndex | str:
    """Compute the sketch index of a local tensor, or return a sentence on why its place in the whole tensor is unknown.

    ``step`` is None for a tensor without token rows, such as a parameter. ``slots`` are the spans (first, count) of the
    step's grid that the first axis covers, if not all. ``mesh`` and ``coords`` are the sizes of the mesh axes and the
    coordinates of this rank, for tensors with sharded ``dims``.
    """
    mesh, coords, shape = mesh or {}, coords or {}, tuple(shape)
    axes: list[Array | None] = [None] * len(shape)
    wholes = list(shape)
    for at, dim in enumerate(_dims_of(dims, len(shape))):
        split = [shard for shard in dim.shards if not shard.partial and mesh.get(shard.axis, 1) > 1]
        if not split:
            continue
        if any(shard.axis not in coords for shard in split):
            return f"the place of this rank along {split[0].axis} is unknown"
        sections = len(dim.sections) or 1
        if (
            dim.groups
            or any(shard.order == "zigzag" for shard in split)
            or any(each.size is not None for each in dim.sections)
            or (dim.size is not None and dim.size.copies > 1)
            or shape[at] % sections
        ):
            return f"sketches do not support the dims {dims!r}"
        parts = math.prod(mesh[shard.axis] for shard in split)
        rank = 0
        for shard in split:
            rank = rank * mesh[shard.axis] + coords[shard.axis]
        local = shape[at] // sections
        indices = np.arange(shape[at])
        axes[at] = indices // local * local * parts + rank * local + indices % local
        wholes[at] = shape[at] * parts
    depth, chosen = _row_axes(shape, step, slots, axes, wholes[0] if wholes else 0)
    runs = _runs(shape[depth:], axes[depth:], wholes[depth:])
    if runs is None:
        return "it is sharded into too many pieces"
    width = math.prod(shape[depth:])
    if chosen is None or step is None:
        return SketchIndex(np.zeros(1, np.int64), np.zeros(1, np.uint32), runs, width, False)
    kept = np.flatnonzero(step.valid[chosen])
    return SketchIndex(kept, step.keys[chosen[kept]], runs, width, True)


def _dims_of(dims: str | None, ndim: int) -> tuple[Dim, ...]:
    """Parse ``dims``; return () if they are None, invalid, or describe a number of axes other than ``ndim``."""
    try:
        parsed = () if dims is None else parse(dims).dims
    except DimsError:
        return ()
    return parsed if len(parsed) == ndim else ()


def _row_axes(
    shape: tuple[int, ...],
    step: RowKeys | None,
    slots: Iterable[tuple[int, int]] | None,
    axes: list[Array | None],
    whole: int,
) -> tuple[int, Array | None]:
    """Return (number of leading token axes, slot of each row); (0, None) for a tensor without token rows.

    ``whole`` is the size of the unsharded first axis.
    """
    if step is None or not shape:
        return 0, None
    size = len(step.keys)
    if slots is not None:
        rows = np.concatenate([np.arange(first, first + count) for first, count in slots] or [np.zeros(0, np.int64)])
        return (1, rows) if len(rows) == shape[0] and (not len(rows) or rows.max() < size) else (0, None)
    depth = len(step.grid)
    if shape[:depth] == step.grid and all(each is None for each in axes[:depth]):
        return depth, np.arange(size)
    if shape[0] == size:
        return 1, np.arange(size)
    if (first := axes[0]) is not None and whole == size:
        return 1, first
    return 0, None


def _runs(shape: tuple[int, ...], axes: list[Array | None], wholes: list[int]) -> Array | None:
    """Compute the runs of consecutive columns, see :attr:`SketchIndex.runs`; None if there are too many."""
    if not math.prod(shape):
        return np.zeros((0, 3), np.int64)
    inner = next((at for at in reversed(range(len(shape))) if axes[at] is not None), -1)
    if inner < 0:
        return np.array([[0, 0, math.prod(shape)]], np.int64)
    width = math.prod(shape[inner + 1 :])
    strides = [math.prod(wholes[at + 1 :]) for at in range(len(shape))]
    indices = axes[inner]
    assert indices is not None
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    pieces = [(int(part[0]), len(part)) for part in np.split(indices, breaks)]
    outer = [np.arange(shape[at]) if (axis := axes[at]) is None else axis for at in range(inner)]
    if math.prod(map(len, outer)) * len(pieces) > _MAX_RUNS:
        return None
    runs, local = [], 0
    for place in product(*outer):
        base = sum(int(i) * stride for i, stride in zip(place, strides, strict=False))
        for first, count in pieces:
            runs.append((local, base + first * strides[inner], count * width))
            local += count * width
    return np.array(runs, np.int64)


class Estimate(NamedTuple):
    """Relative error ||target - baseline|| / ||baseline|| of a tensor, estimated from sketches."""

    error: float
    low: float
    """Lower bound of the 95 % confidence interval."""
    high: float
    """Upper bound of the 95 % confidence interval."""


NO_ERROR = Estimate(0.0, 0.0, 0.0)


def estimate(baseline: Array, target: Array) -> Estimate:
    """Estimate the relative error from the counters of both tensors.

    The squared norm of a sketch is an unbiased estimate of the squared norm of its tensor, with a relative standard
    error of at most ``sqrt(2 / counters)``: 8.8 % for 256 counters. The ratio of two estimates, of the difference and
    of the baseline, has ``s = sqrt(4 / counters)``: 12.5 %, so that the error itself is off by 4.2 % at the median.
    The 95 % interval is ``error / sqrt(1 + z s)`` to ``error / sqrt(1 - z s)`` with z = 1.96. Errors below
    :data:`RESOLUTION` are rounding and count as 0. Counters that overflowed float32 (e.g. of an attention mask filled
    with the lowest float32) give an error of 0 if equal, and infinity otherwise.
    """
    one, two = baseline.astype(np.float64), target.astype(np.float64)
    if np.array_equal(one, two, equal_nan=True):
        return NO_ERROR
    if not (np.isfinite(one).all() and np.isfinite(two).all()):
        return Estimate(math.inf, math.inf, math.inf)
    baseline_sq, difference_sq = float(one @ one), float((two - one) @ (two - one))
    if baseline_sq == 0.0:
        return Estimate(math.inf, math.inf, math.inf)
    error = math.sqrt(difference_sq / baseline_sq)
    if error < RESOLUTION:
        return NO_ERROR
    return Estimate(error, error * LOW_FACTOR, error * HIGH_FACTOR)
