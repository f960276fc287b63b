"""Record: one observation of a tensor, as stored on disk and sent to the recorder."""

import json
from collections.abc import Iterable
from sys import intern
from typing import Any, NamedTuple

from tapscope.core.formatting import number, shape
from tapscope.core.html_table import html_table
from tapscope.run_format import validation
from tapscope.run_format.stats import Stats as Stats

COUNTERS = 256
"""Number of counters of a sketch."""
FORWARD = "forward"
"""Pass of values observed in a regular forward."""
RECOMPUTE = "recompute"
"""Pass of values observed when activation checkpointing recomputes the forward during the backward."""
BACKWARD = "backward"
"""Pass of gradients."""
LINE_START = b'{"type":"record"'
"""First bytes of every record line; distinguishes record lines from step, site and event lines."""


class Key(NamedTuple):
    """The identity of a record within its run."""

    site: str
    """``PATH:PORT``, see :mod:`tapscope.core.site`."""
    step: int
    rank: int = 0
    occurrence: int = 0
    """Index of the firing within its site, step, microbatch and pass; unrecorded firings count."""
    micro: int = 0
    """Index of the microbatch."""
    pass_: str = FORWARD
    model: str = ""
    """Name of the model if a process has several, e.g. actor or draft; empty if there is only one."""

    @property
    def tensor_name(self) -> str:
        """Name of the payload in its segment, unique within a rank."""
        return tensor_name(self.site, self.step, self.occurrence, self.micro, self.pass_, self.model)


def virtual_stage(number: int) -> str:
    """Return the :attr:`Key.model` of a virtual pipeline stage (model chunk) of a process, e.g. ``vp0``."""
    return f"vp{number}"


def is_virtual_stage(model: str) -> bool:
    """Return whether ``model`` is the name of a virtual pipeline stage."""
    return model[:2] == "vp" and model[2:].isdecimal()


def virtual_stages(models: Iterable[str]) -> dict[str, int]:
    """Map the names of virtual pipeline stages to their numbers.

    Returns an empty dict unless ``models`` are exactly ``vp0`` to ``vpN`` with at least two stages.
    """
    names = set(models)
    numbers = {virtual_stage(number): number for number in range(len(names))}
    return numbers if len(names) > 1 and names == set(numbers) else {}


def tensor_name(site: str, step: int, occurrence: int, micro: int, pass_: str, model: str) -> str:
    """Return the :attr:`Key.tensor_name` for the given key fields."""
    prefix = f"{model}/" if model else ""
    return f"{prefix}{step}.{micro}.{pass_}/{site}#{occurrence}"


class Entry(NamedTuple):
    """Location of a payload on disk; several records may share one entry."""

    file: str
    """Name of the segment file, relative to the rank's directory."""
    offset: int
    """Offset of the first byte from the start of the file."""
    nbytes: int


class Slice(NamedTuple):
    """The slice of a tensor that a record covers: its shape, statistics, hash and payload describe only this slice."""

    rows: tuple[int, int, int]
    """(start, stop, step) along the token axes (flattened if the grid has two), otherwise along the first axis."""
    shape: tuple[int, ...]
    """Local shape of the unsliced tensor."""


class StoredSketch(NamedTuple):
    """Location of the sketch of a record; see :mod:`tapscope.run_format.sketch`."""

    by_rows: bool
    """Whether elements are hashed by token row and column; otherwise by their position in the tensor alone."""
    crc32: int
    """CRC-32 of the counters."""
    entry: Entry
    """Location of the 256 float32 counters."""


class Record(NamedTuple):
    """One observation of a tensor (or of another value): key, metadata, digests, and the location of its payload."""

    key: Key
    seq: int
    """Sequence number within the rank, from 0."""
    dtype: str | None
    """Dtype name, see :mod:`tapscope.core.dtypes`; None if the value is not a tensor."""
    shape: tuple[int, ...]
    """Local shape."""
    dims: str | None = None
    """Axis names and sharding, see :mod:`tapscope.core.dims`; None if undeclared."""
    rows: tuple[tuple[int, int], ...] | None = None
    """Spans (first, count) of slots in the step's token grid that the token axis covers; None for the whole grid."""
    stats: Stats | None = None
    hash: str | None = None
    """128-bit, order-sensitive hash of the bytes in hexadecimal; see docs/reference/run-format.md."""
    bag: str | None = None
    """64-bit, order-independent hash of the elements in hexadecimal, additive over shards; see
    docs/reference/run-format.md."""
    entry: Entry | None = None
    """Location of the values; None if they were not stored."""
    value: Any = None
    """A non-tensor value as ``{"type": ..., "value": ...}``."""
    slice: Slice | None = None
    """None if the record covers the whole tensor."""
    cap: int | None = None
    """Size cap of the rule in bytes if the tensor exceeded it, so that only statistics were kept; otherwise None."""
    tags: dict[str, Any] | None = None
    """Tags of an explicit dump: name -> JSON value."""
    sketch: StoredSketch | None = None
    """Stored sketch of a record without values; None if there is no sketch."""

    @property
    def nbytes(self) -> int:
        """Size of the stored values in bytes; 0 if they were not stored."""
        return self.entry.nbytes if self.entry else 0

    def _repr_html_(self) -> str:
        """Return the metadata and statistics of the record as an HTML table for notebooks."""
        key, stats = self.key, self.stats
        facts = [("step", str(key.step)), ("rank", str(key.rank)), ("dtype", self.dtype or "value")]
        facts += [("shape", shape(self.shape)), ("dims", self.dims or "")]
        if stats is not None:
            facts += [(name, number(getattr(stats, name))) for name in ("min", "max", "mean", "rms", "absmax")]
            facts += [("not finite", f"{stats.nonfinite:,} of {stats.count:,}")]
        return html_table([(name, text) for name, text in facts if text], title=key.site)

    @property
    def payload(self) -> tuple[Entry, str, tuple[int, ...]] | None:
        """(entry, dtype, shape) of the stored payload, i.e. of the values or of the sketch; None if there is none."""
        if self.sketch is not None:
            return self.sketch.entry, "float32", (COUNTERS,)
        return None if self.entry is None or self.dtype is None else (self.entry, self.dtype, self.shape)


def to_json(record: Record) -> dict[str, Any]:
    """Return the ``record`` line of docs/reference/run-format.md; fields with default values are omitted."""
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
    if record.dtype is not None or record.shape:
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
        line["stats"] = record.stats.to_json()
    if record.sketch is not None:
        line["sketch"] = {"by_rows": record.sketch.by_rows, "crc32": record.sketch.crc32}
        line["entry"] = list(record.sketch.entry)
    if record.entry is not None:
        line["entry"] = list(record.entry)
    return line


def from_json(line: dict[str, Any], rank: int) -> Record:
    """Parse a ``record`` line, the inverse of :func:`to_json`.

    Raises KeyError, TypeError or ValueError for a malformed line.
    """
    get = line.get
    site, step, seq, dtype = line["site"], line["step"], line["seq"], get("dtype")
    occurrence, micro, pass_, model = get("occurrence", 0), get("micro", 0), get("pass", FORWARD), get("model", "")
    dims, hash_, bag, shape = get("dims"), get("hash"), get("bag"), get("shape", _SCALAR)
    # Fast check for the common case, because runs have hundreds of thousands of records.
    if not (
        type(site) is type(pass_) is type(model) is str
        and type(step) is type(seq) is type(occurrence) is type(micro) is int
        and site.isascii()
        and min(step, seq, occurrence, micro) >= 0
        and max(step, seq) < validation.MAX_COUNT
        and {type(dims), type(hash_), type(bag)} <= _TEXT
    ):
        _check(line)
    int(hash_ or "0", 16), int(bag or "0", 16)  # raises ValueError for invalid hex
    stats, rows, entry, part, cap = get("stats"), get("rows"), get("entry"), get("slice"), get("cap")
    from_sketch = None
    if (sketch := get("sketch")) is not None:
        from_sketch, entry = _sketch_from_json(sketch, entry), None
    return Record(
        Key(intern(site), step, rank, occurrence, micro, pass_, model),
        seq,
        None if dtype is None else validation.dtype(line),
        validation.counts(shape, "shape"),
        dims,
        None if rows is None else validation.spans(rows, "rows"),
        None if stats is None else Stats.from_json(stats),
        hash_,
        bag,
        None if entry is None else _entry_from_json(entry),
        validation.mapping(line, "value"),
        None if part is None else _slice_from_json(part),
        None if cap is None else validation.count(line, "cap"),
        validation.mapping(line, "tags"),
        from_sketch,
    )


_SCALAR: list[int] = []
_TEXT = {str, type(None)}


def _check(line: dict[str, Any]) -> None:
    """Raise ValueError for a field that must be a string or a count and is not; a non-ASCII site is valid."""
    for name, default in (("site", ()), ("pass", (FORWARD,)), ("model", ("",))):
        validation.text(line, name, *default)
    for name in ("dims", "hash", "bag"):
        validation.text(line, name, None)
    for name in ("step", "seq", "occurrence", "micro"):
        validation.count(line, name, *(() if name in ("step", "seq") else (0,)))


def _entry_from_json(entry: list[Any]) -> Entry:
    file, offset, nbytes = entry
    if type(file) is not str or type(offset) is not int or not validation.is_count(nbytes):
        raise ValueError(f"entry is {validation.short(entry)}, not [file, offset, nbytes]")
    return Entry(intern(file), offset, nbytes)


def _sketch_from_json(sketch: dict[str, Any], entry: Any) -> StoredSketch:
    place = None if entry is None else _entry_from_json(entry)
    if type(sketch) is not dict or type(sketch.get("by_rows")) is not bool or place is None:
        raise ValueError(f"sketch is {validation.short(sketch)}, not an object with by_rows, or it has no entry")
    if place.nbytes != 4 * COUNTERS:
        raise ValueError(f"sketch has {place.nbytes} bytes, not {4 * COUNTERS}")
    return StoredSketch(sketch["by_rows"], validation.count(sketch, "crc32"), place)


def _slice_from_json(part: dict[str, Any]) -> Slice:
    start, stop, step = validation.counts(part["rows"], "rows of the slice")
    return Slice((start, stop, step), validation.counts(part["shape"], "shape of the slice"))


def encode(record: Record) -> bytes:
    """Encode a record as one line of UTF-8 JSON, without the newline."""
    return _ENCODER.encode(to_json(record)).encode()


_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)
