"""Record: one observation of one tensor, as it lies on disk and travels on the wire."""

import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

FORWARD = "forward"
"""The pass of an ordinary forward; others are ``recompute`` and ``backward``."""


class Key(NamedTuple):
    """A record's identity within its run."""

    site: str
    """``PATH:PORT``, see :mod:`tapscope.site`."""
    step: int
    rank: int = 0
    occurrence: int = 0
    """The n-th firing of the site in this step, micro and pass, kept or not."""
    micro: int = 0
    pass_: str = FORWARD
    model: str = ""
    """Tells several models of one process apart (actor, draft); empty for the only one."""

    @property
    def tensor_name(self) -> str:
        """The name of the payload in its segment; unique within one rank."""
        model = f"{self.model}/" if self.model else ""
        return f"{model}{self.step}.{self.micro}.{self.pass_}/{self.site}#{self.occurrence}"


@dataclass(frozen=True, slots=True)
class Stats:
    """Mergeable statistics over the finite values of a tensor; non-finite ones are counted."""

    count: int
    """Number of elements, non-finite ones included."""
    nan: int
    posinf: int
    neginf: int
    zeros: int
    subnormals: int
    min: float | None
    """None when no element is finite."""
    max: float | None
    absmax: float | None
    sum: float
    sumsq: float

    @property
    def nonfinite(self) -> int:
        """NaN and infinite elements."""
        return self.nan + self.posinf + self.neginf

    @property
    def finite(self) -> int:
        """Elements that the sums are over."""
        return self.count - self.nonfinite

    @property
    def mean(self) -> float | None:
        """Mean of the finite elements."""
        return self.sum / self.finite if self.finite else None

    @property
    def rms(self) -> float | None:
        """Root mean square of the finite elements."""
        return math.sqrt(max(self.sumsq, 0.0) / self.finite) if self.finite else None

    @property
    def std(self) -> float | None:
        """Population standard deviation of the finite elements."""
        mean = self.mean
        return None if mean is None else math.sqrt(max(self.sumsq / self.finite - mean * mean, 0.0))

    def merge(self, other: "Stats") -> "Stats":
        """Statistics of both tensors laid side by side (shards); never meaningful for partial sums."""
        return Stats(
            self.count + other.count,
            self.nan + other.nan,
            self.posinf + other.posinf,
            self.neginf + other.neginf,
            self.zeros + other.zeros,
            self.subnormals + other.subnormals,
            _pick(min, self.min, other.min),
            _pick(max, self.max, other.max),
            _pick(max, self.absmax, other.absmax),
            self.sum + other.sum,
            self.sumsq + other.sumsq,
        )


def _pick(choose: Any, a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return b if a is None else a
    return float(choose(a, b))


class Entry(NamedTuple):
    """Where a record's bytes are; several records may share one entry."""

    file: str
    """Segment file, relative to the rank's directory."""
    offset: int
    """First byte, counted from the start of the file."""
    nbytes: int


class Slice(NamedTuple):
    """Which part of a tensor a record holds; its shape, statistics, hash and bytes are of that part."""

    rows: tuple[int, int, int]
    """(start, stop, step) along the token axes (flattened, where the grid has two), else along the first axis."""
    shape: tuple[int, ...]
    """Local shape of the whole tensor."""


@dataclass(frozen=True, slots=True)
class Record:
    """One observation."""

    key: Key
    seq: int
    """Order within the rank, from 0."""
    dtype: str | None
    """Element type, see :mod:`tapscope.dtypes`; None for a value that is no tensor."""
    shape: tuple[int, ...]
    dims: str | None = None
    """Axis names and sharding, see :mod:`tapscope.dims`; None when nobody said."""
    rows: tuple[tuple[int, int], ...] | None = None
    """Which slots of the step's token grid the token axis holds, as (first, count); None for all of them."""
    stats: Stats | None = None
    hash: str | None = None
    """128 bits over the bytes, order-sensitive, see docs/format.md."""
    bag: str | None = None
    """64 bits over the elements, order-free and additive over shards, see docs/format.md."""
    entry: Entry | None = None
    value: Any = None
    """A non-tensor value as ``{"type": ..., "value": ...}``."""
    slice: Slice | None = None
    """None when the whole tensor was taken."""
    cap: int | None = None
    """The rule's size cap in bytes, where the tensor was larger and only its statistics were kept; else None."""
    tags: dict[str, Any] | None = None
    """What the caller of an explicit dump said of it: name -> JSON value."""

    @property
    def nbytes(self) -> int:
        """Bytes of the payload on disk; 0 when only statistics were kept."""
        return self.entry.nbytes if self.entry else 0


def to_json(record: Record) -> dict[str, Any]:
    """The ``record`` line of docs/format.md; fields at their default are left out."""
    key = record.key
    line: dict[str, Any] = {"type": "record", "seq": record.seq, "site": key.site, "step": key.step}
    if key.occurrence:
        line["occurrence"] = key.occurrence
    if key.micro:
        line["micro"] = key.micro
    if key.pass_ != FORWARD:
        line["pass"] = key.pass_
    if key.model:
        line["model"] = key.model
    if record.dtype is not None:
        line["dtype"] = record.dtype
        line["shape"] = list(record.shape)
    for name in ("dims", "rows"):
        value = getattr(record, name)
        if value is not None:
            line[name] = value
    if record.slice is not None:
        line["slice"] = {"rows": list(record.slice.rows), "shape": list(record.slice.shape)}
    for name in ("cap", "tags", "value", "hash", "bag"):
        value = getattr(record, name)
        if value is not None:
            line[name] = value
    if record.stats is not None:
        line["stats"] = _stats_to_json(record.stats)
    if record.entry is not None:
        line["entry"] = list(record.entry)
    return line


def from_json(line: dict[str, Any], rank: int) -> Record:
    """The inverse of :func:`to_json`; raises KeyError, TypeError or ValueError for a malformed line."""
    key = Key(
        line["site"],
        int(line["step"]),
        rank,
        line.get("occurrence", 0),
        line.get("micro", 0),
        line.get("pass", FORWARD),
        line.get("model", ""),
    )
    stats, rows, entry, part = line.get("stats"), line.get("rows"), line.get("entry"), line.get("slice")
    return Record(
        key,
        int(line["seq"]),
        line.get("dtype"),
        tuple(line.get("shape", ())),
        line.get("dims"),
        None if rows is None else tuple((int(first), int(count)) for first, count in rows),
        None if stats is None else _stats_from_json(stats),
        line.get("hash"),
        line.get("bag"),
        None if entry is None else Entry(str(entry[0]), int(entry[1]), int(entry[2])),
        line.get("value"),
        None if part is None else _slice_from_json(part),
        line.get("cap"),
        line.get("tags"),
    )


def _slice_from_json(part: dict[str, Any]) -> Slice:
    start, stop, step = part["rows"]
    return Slice((int(start), int(stop), int(step)), tuple(part["shape"]))


def _stats_to_json(stats: Stats) -> dict[str, Any]:
    return {
        "count": stats.count,
        "nan": stats.nan,
        "posinf": stats.posinf,
        "neginf": stats.neginf,
        "zeros": stats.zeros,
        "subnormals": stats.subnormals,
        "min": stats.min,
        "max": stats.max,
        "absmax": stats.absmax,
        "sum": _finite(stats.sum),
        "sumsq": _finite(stats.sumsq),
    }


def _stats_from_json(stats: dict[str, Any]) -> Stats:
    sums = {name: math.inf if stats[name] is None else stats[name] for name in ("sum", "sumsq")}
    return Stats(**(stats | sums))


def encode(record: Record) -> bytes:
    """One JSON line without its newline, UTF-8."""
    return _ENCODER.encode(to_json(record)).encode()


_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
