"""Record: one observation of one tensor, as stored on disk and sent over the wire."""

import json
from collections.abc import Iterable
from sys import intern
from typing import Any, NamedTuple

from tapscope.core.formatting import number, shape
from tapscope.core.html_table import html_table
from tapscope.run_format import validation
from tapscope.run_format.stats import Stats as Stats

COUNTERS = 256
"""Counters of a sketch."""
FORWARD = "forward"
"""The pass of an ordinary forward."""
RECOMPUTE = "recompute"
"""The pass of a forward that is recomputed for its backward (activation checkpointing)."""
BACKWARD = "backward"
"""The pass of gradients."""
LINE_START = b'{"type":"record"'
"""How the lines of records begin, unlike those of steps, sites and events."""


class Key(NamedTuple):
    """A record's identity within its run."""

    site: str
    """``PATH:PORT``, see :mod:`tapscope.core.site`."""
    step: int
    rank: int = 0
    occurrence: int = 0
    """Index of the firing of the site in this step, micro and pass, recorded or not."""
    micro: int = 0
    pass_: str = FORWARD
    model: str = ""
    """Name of the model, if a process has several (actor, draft); empty for the only one."""

    @property
    def tensor_name(self) -> str:
        """The name of the payload in its segment; unique within one rank."""
        return tensor_name(self.site, self.step, self.occurrence, self.micro, self.pass_, self.model)


def virtual_stage(number: int) -> str:
    """The name, as :attr:`Key.model`, of one of the virtual pipeline stages of a process: parts of one model."""
    return f"vp{number}"


def is_virtual_stage(model: str) -> bool:
    """Whether a model has such a name."""
    return model[:2] == "vp" and model[2:].isdecimal()


def virtual_stages(models: Iterable[str]) -> dict[str, int]:
    """Name -> number of the virtual stages of one model; empty if ``models`` are something else."""
    names = set(models)
    numbers = {virtual_stage(number): number for number in range(len(names))}
    return numbers if len(names) > 1 and names == set(numbers) else {}


def tensor_name(site: str, step: int, occurrence: int, micro: int, pass_: str, model: str) -> str:
    """The :attr:`Key.tensor_name` of a key with these members."""
    prefix = f"{model}/" if model else ""
    return f"{prefix}{step}.{micro}.{pass_}/{site}#{occurrence}"


class Entry(NamedTuple):
    """Location of a record's bytes; several records may share one entry."""

    file: str
    """Segment file, relative to the rank's directory."""
    offset: int
    """First byte, counted from the start of the file."""
    nbytes: int


class Slice(NamedTuple):
    """The part of a tensor that a record holds; its shape, statistics, hash and bytes are of that part."""

    rows: tuple[int, int, int]
    """(start, stop, step) along the token axes (flattened, if the grid has two), else along the first axis."""
    shape: tuple[int, ...]
    """Local shape of the whole tensor."""


class StoredSketch(NamedTuple):
    """Where the counters of a record's sketch are; see :mod:`tapscope.run_format.sketch`."""

    by_rows: bool
    """Whether its elements are identified by token row and column; otherwise by their place in the tensor alone."""
    crc32: int
    """Checksum of the counters."""
    entry: Entry
    """256 float32 counters."""


class Record(NamedTuple):
    """One observation."""

    key: Key
    seq: int
    """Order within the rank, from 0."""
    dtype: str | None
    """Element type, see :mod:`tapscope.core.dtypes`; None for a value that is not a tensor."""
    shape: tuple[int, ...]
    dims: str | None = None
    """Axis names and sharding, see :mod:`tapscope.core.dims`; None if undeclared."""
    rows: tuple[tuple[int, int], ...] | None = None
    """Which slots of the step's token grid the token axis holds, as (first, count); None for all of them."""
    stats: Stats | None = None
    hash: str | None = None
    """128 bits over the bytes, order-sensitive, see docs/reference/run-format.md."""
    bag: str | None = None
    """64 bits over the elements, order-free and additive over shards, see docs/reference/run-format.md."""
    entry: Entry | None = None
    value: Any = None
    """A non-tensor value as ``{"type": ..., "value": ...}``."""
    slice: Slice | None = None
    """None when the whole tensor was taken."""
    cap: int | None = None
    """The rule's size cap in bytes, if the tensor was larger and only its statistics were kept; else None."""
    tags: dict[str, Any] | None = None
    """Tags of an explicit dump: name -> JSON value."""
    sketch: StoredSketch | None = None
    """Its sketch, of a record without values; None without one."""

    @property
    def nbytes(self) -> int:
        """Bytes of the payload on disk; 0 if only statistics were kept."""
        return self.entry.nbytes if self.entry else 0

    def _repr_html_(self) -> str:
        """A small table for notebooks: what the tensor is, and its statistics."""
        key, stats = self.key, self.stats
        facts = [("step", str(key.step)), ("rank", str(key.rank)), ("dtype", self.dtype or "value")]
        facts += [("shape", shape(self.shape)), ("dims", self.dims or "")]
        if stats is not None:
            facts += [(name, number(getattr(stats, name))) for name in ("min", "max", "mean", "rms", "absmax")]
            facts += [("not finite", f"{stats.nonfinite:,} of {stats.count:,}")]
        return html_table([(name, text) for name, text in facts if text], title=key.site)

    @property
    def payload(self) -> tuple[Entry, str, tuple[int, ...]] | None:
        """(entry, dtype, shape) of what is stored: the values or the counters of a sketch; None without any."""
        if self.sketch is not None:
            return self.sketch.entry, "float32", (COUNTERS,)
        return None if self.entry is None or self.dtype is None else (self.entry, self.dtype, self.shape)


def to_json(record: Record) -> dict[str, Any]:
    """The ``record`` line of docs/reference/run-format.md; fields at their default are left out."""
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
    """The inverse of :func:`to_json`; raises KeyError, TypeError or ValueError for a malformed line."""
    get = line.get
    site, step, seq, dtype = line["site"], line["step"], line["seq"], get("dtype")
    occurrence, micro, pass_, model = get("occurrence", 0), get("micro", 0), get("pass", FORWARD), get("model", "")
    dims, hash_, bag, shape = get("dims"), get("hash"), get("bag"), get("shape", _SCALAR)
    # A fast check for the common case: runs hold hundreds of thousands of records.
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
    """Raise ValueError for a member that is not a string or a count; not if only the site is not ASCII."""
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
    """One JSON line without its newline, UTF-8."""
    return _ENCODER.encode(to_json(record)).encode()


_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)
