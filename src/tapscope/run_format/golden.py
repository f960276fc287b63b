"""Golden: one file with the sketches of a run, small enough for git, to check later runs against.

A golden is a safetensors file. Its metadata has ``format`` (``tapscope-golden``), ``crc32``, ``schema`` and
``manifest`` (the manifest of the run, as JSON). The tensor ``sketches`` [n, 256] float32 contains the counters;
``lines.RANK`` contains the lines of a rank (see run-format.md), compressed with zlib. The output is deterministic.

Every byte is covered by a checksum. ``crc32`` covers the file up to the end of the header, computed with its own digits
set to 00000000. Lines are covered by zlib's checksum, and each sketch by a CRC-32 in its record line. Files of schema 1
lack ``crc32``.
"""

import json
import os
import re
import shutil
import struct
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tapscope.core import dtypes
from tapscope.core.errors import DataError, RunCorruptError, RunVersionError
from tapscope.core.regular_files import read_small, reading, replacing
from tapscope.core.site import describe_layers, is_parameter
from tapscope.run_format.index import read_index
from tapscope.run_format.ledger import encode_line
from tapscope.run_format.manifest import FORMAT, INDEX, MANIFEST, check_manifest, rank_dir
from tapscope.run_format.record import FORWARD, Entry, Record, StoredSketch, encode
from tapscope.run_format.run import Run
from tapscope.run_format.sketch import NBYTES, RowKeys, SketchIndex, row_keys, sketch_index

Array = np.ndarray[Any, Any]
GOLDEN_FORMAT = "tapscope-golden"
SCHEMA = 2
"""Newest schema of golden files that this version reads."""
_MAX_BYTES = 1 << 30
_MAX_LINES = 1 << 30
_MAX_HEADER = 1 << 24
_BEGINNING = f'{{"__metadata__":{{"format":"{GOLDEN_FORMAT}"'.encode()
"""First bytes of the header that :func:`write_golden` writes."""
_CRC32 = re.compile(rb'"crc32":"([0-9a-f]{8})"')
"""Matches the checksum in the header; the manifest, an escaped string there, cannot match."""
_SEGMENT = "seg-000000.safetensors"
_MEMBERS = ("world_size", "mesh", "own_steps", "framework", "model", "dtype", "kv_cache_dtype", "model_config")


def write_golden(
    run: Run, path: Path, chosen: Callable[[str], bool] | None, sketch_of: Callable[[Array, SketchIndex], Array]
) -> tuple[int, int]:
    """Write a golden of ``run`` to ``path``, replacing the file atomically.

    ``chosen`` selects the sites (default: :func:`is_layer_output`). ``sketch_of`` computes the sketch of values that
    were recorded in full. Returns (number of sketches, file size in bytes). Raises DataError if there is nothing to
    write, and OSError.
    """
    accept = chosen or is_layer_output
    counters: list[Array] = []
    tensors: dict[str, Array] = {}
    keys: dict[tuple[int, int], RowKeys | None] = {}
    lacking = ""
    for rank in run.ranks:
        kept: list[Record] = []
        for record in run.records.of(ranks=[rank]):
            if not accept(record.key.site) or record.key.pass_ != FORWARD or not dtypes.is_float(record.dtype):
                continue
            sketched = _sketch_of(run, record, keys, sketch_of)
            if sketched is None:
                lacking = lacking or record.key.site
                continue
            by_rows, sketch = sketched
            place = Entry(_SEGMENT, len(counters) * NBYTES, NBYTES)
            stored = StoredSketch(by_rows, zlib.crc32(sketch.tobytes()), place)
            counters.append(sketch)
            kept.append(record._replace(entry=None, sketch=stored, tags=None, cap=None, seq=len(kept)))
        text = b"".join(line + b"\n" for line in _lines(run, rank, kept))
        tensors[f"lines.{rank}"] = np.frombuffer(zlib.compress(text, 9), np.uint8)
    if not counters:
        if lacking:
            raise DataError(f"{lacking} has neither a sketch nor values: capture with keep=sketch or keep=full")
        hint = "no layer outputs" if chosen is None else "no site of a forward with floating-point values matches"
        raise DataError(
            f"{run.path}: {hint}; select sites with --site; {describe_layers(run.records.distinct_sites())}"
        )
    manifest = {name: run.manifest[name] for name in _MEMBERS if run.manifest.get(name) is not None}
    manifest |= {"format": FORMAT, "version": run.manifest["version"], "hash_version": run.hash_version}
    metadata = {"format": GOLDEN_FORMAT, "crc32": "0" * 8, "schema": str(SCHEMA)}
    metadata["manifest"] = json.dumps(manifest, sort_keys=True)
    data = _encode(metadata, {"sketches": np.stack(counters), **tensors})
    with replacing(path) as file:
        file.write(data)
    return len(counters), len(data)


def is_layer_output(site: str) -> bool:
    """Return whether ``site`` is an output of a layer (``layers.3:out``), of ``lm_head``, or of the whole model."""
    module, _, port = site.rpartition(":")
    name = module.rpartition(".")[2]
    return (port == "out" or port.startswith("out[")) and (name.isdigit() or name in ("", "lm_head"))


def is_golden(path: Path) -> bool:
    """Return whether the file is a golden of any schema.

    Also accepts a golden with one wrong byte at its start, or truncated after its format, so that reading it reports
    the damage.
    """
    _, text = _header(path)
    num_wrong = sum(a != b for a, b in zip(text, _BEGINNING, strict=False))
    return (len(text) >= len(_BEGINNING) and num_wrong <= 1) or _metadata(text).get("format") == GOLDEN_FORMAT


def read_golden(path: Path) -> Run:
    """Open a golden file as a run, unpacked into a temporary directory.

    Raises RunVersionError for a newer schema, and RunCorruptError for a damaged file.
    """
    manifest, sketches, lines = _content(path, _checked_metadata(path))
    root = Path(tempfile.mkdtemp(prefix="tapscope-golden-"))
    try:
        (root / MANIFEST).write_text(json.dumps(manifest))
        (root / _SEGMENT).write_bytes(sketches)
        ranks = {}
        for rank, text in lines.items():
            rank_dir(root, rank).mkdir()
            (rank_dir(root, rank) / INDEX).write_bytes(text)
            os.link(root / _SEGMENT, rank_dir(root, rank) / _SEGMENT)
            ranks[rank] = read_index(rank_dir(root, rank), rank)
        for record in (record for index in ranks.values() for record in index.records):
            _check_sketch(record, sketches, path)
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    run = Run(root, manifest, ranks, name=path.name)
    run.path = path
    weakref.finalize(run, shutil.rmtree, root, ignore_errors=True)
    return run


def _checked_metadata(path: Path) -> dict[str, Any]:
    """Return the verified metadata of the header; raises RunVersionError and RunCorruptError."""
    begin, text = _header(path)
    (size,) = struct.unpack("<Q", begin)
    if size > _MAX_HEADER:
        raise _damaged(path, f"its header would have {size} bytes")
    if len(text) < size:
        raise RunCorruptError(
            f"{path}: truncated golden file: it ends in its header, at byte {len(text)} of {size}; record it again"
        )
    has_crc32 = _check_header(begin, text, path)
    metadata = _metadata(text)
    schema = metadata.get("schema")
    if not (isinstance(schema, str) and schema.isdecimal()):
        raise _damaged(path, "its header has no schema")
    if int(schema) > SCHEMA:
        raise RunVersionError(
            f"{path} has golden schema {schema}; this tapscope reads up to {SCHEMA}: upgrade tapscope"
        )
    if int(schema) > 1 and not has_crc32:
        raise _damaged(path, "its header has no CRC-32")
    return metadata


def _content(path: Path, metadata: dict[str, Any]) -> tuple[dict[str, Any], bytes, dict[int, bytes]]:
    """Return (manifest, bytes of all counters, rank -> decompressed lines); raises RunCorruptError."""
    try:
        manifest = check_manifest(json.loads(metadata["manifest"]), path, path)
        tensors = _decode(read_small(path, _MAX_BYTES))
        sketches = tensors.pop("sketches")
        lines = {int(name.removeprefix("lines.")): _inflate(data) for name, data in tensors.items()}
        if len(sketches) % NBYTES:
            raise ValueError("its content does not fit its header")
    except (
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
        zlib.error,
        OSError,
        struct.error,
    ) as error:
        raise _damaged(path, error) from None
    return manifest, sketches, lines


def _damaged(path: Path, what: object) -> RunCorruptError:
    return RunCorruptError(f"{path}: damaged golden file: {what}; record it again")


def _check_header(begin: bytes, text: bytes, path: Path) -> bool:
    """Return whether the header has a checksum; raise RunCorruptError if the checksum does not match."""
    match = _CRC32.search(text)
    if match is None:
        return False
    if int(match[1], 16) != _header_crc32(begin + text):
        raise _damaged(path, "its header differs from its CRC-32")
    return True


def _header_crc32(header: bytes) -> int:
    """Return the CRC-32 of a header (including its 8-byte size), computed with the checksum field set to 00000000."""
    return zlib.crc32(_CRC32.sub(b'"crc32":"00000000"', header, count=1))


def _check_sketch(record: Record, sketches: bytes, path: Path) -> None:
    """Raise RunCorruptError unless the counters of ``record`` match their checksum.

    Checked when the file is opened, because a comparison skips the counters of tensors with equal hashes.
    """
    if record.sketch is None:
        return
    begin, end = record.sketch.entry.offset, record.sketch.entry.offset + record.sketch.entry.nbytes
    if zlib.crc32(sketches[begin:end]) != record.sketch.crc32:
        key = record.key
        raise _damaged(path, f"the sketch of {key.site} (rank {key.rank}, step {key.step}) differs from its CRC-32")


def _sketch_of(
    run: Run,
    record: Record,
    keys: dict[tuple[int, int], RowKeys | None],
    sketch_of: Callable[[Array, SketchIndex], Array],
) -> tuple[bool, Array] | None:
    """Return the sketch of ``record`` as (whether it is indexed by token rows, counters).

    Computes the sketch from the values if none was recorded. Returns None if that is impossible.
    """
    if record.sketch is not None:
        return record.sketch.by_rows, np.array(run.sketch(record))
    if record.entry is None or record.dtype in dtypes.COMPLEX or (record.slice is not None and record.rows is None):
        return None
    at = record.key.step, record.key.rank
    if at not in keys:
        line = run.steps.get(at[0], {}).get(at[1])
        keys[at] = None if line is None else row_keys(line.info)
    by_step = None if is_parameter(record.key.site) else keys[at]
    index = sketch_index(
        record.shape, by_step, dims=record.dims, slots=record.rows, mesh=run.mesh, coords=run.coords(record.key.rank)
    )
    if not isinstance(index, SketchIndex):
        return None
    return index.by_rows, sketch_of(run.array(record), index)


def _lines(run: Run, rank: int, records: list[Record]) -> Iterator[bytes]:
    """Yield the lines of one rank of the golden: those required to align and name records."""
    opened = {"rank": rank, "world_size": run.world_size, "mesh": run.mesh, "coords": run.coords(rank)}
    yield encode_line({"type": "event", "kind": "open", "time": 0.0, **opened})
    sites = {record.key.site for record in records}
    per_step: dict[int, int] = {}
    for record in records:
        per_step[record.key.step] = per_step.get(record.key.step, 0) + 1
    for line in _recorded(run, rank):
        if (line.get("type") == "site" and line.get("site") in sites) or (
            line.get("type") == "step" and line.get("at") == "begin"
        ):
            yield encode_line(line)
    for record in records:
        yield encode(record)
    for step in sorted(run.steps):
        if rank in run.steps[step]:
            number = per_step.get(step, 0)
            counts = {"seen": number, "sent": number, "dropped": 0, "failed": 0}
            yield encode_line({"type": "step", "at": "end", "step": step, **counts})
    yield encode_line({"type": "event", "kind": "close", "time": 0.0})


def _recorded(run: Run, rank: int) -> Iterator[dict[str, Any]]:
    with (rank_dir(run.path, rank) / INDEX).open("rb") as file:
        for text in file:
            if text.startswith((b'{"type":"site"', b'{"type":"step"')):
                try:
                    yield json.loads(text)
                except ValueError:  # reading the run reports the malformed line
                    continue


def _header(path: Path) -> tuple[bytes, bytes]:
    """Return (the 8 bytes of the header size, the header or the part of it that the file has).

    Only the beginning of a header larger than 16 MiB is read. Returns 8 zeros and b"" if the file has no header.
    """
    try:
        with reading(path) as file:
            (size,) = struct.unpack("<Q", begin := file.read(8))
            return begin, file.read(size if size <= _MAX_HEADER else len(_BEGINNING))
    except (OSError, struct.error):
        return bytes(8), b""


def _metadata(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    return metadata if isinstance(metadata, dict) else {}


def _encode(metadata: dict[str, str], tensors: dict[str, Array]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, array in tensors.items():
        kind = "F32" if array.dtype == np.float32 else "U8"
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    text = struct.pack("<Q", len(text)) + text
    text = _CRC32.sub(b'"crc32":"%08x"' % _header_crc32(text), text, count=1)
    return text + b"".join(array.tobytes() for array in tensors.values())


def _decode(data: bytes) -> dict[str, bytes]:
    (size,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    parts = {}
    for name, about in header.items():
        if name != "__metadata__":
            begin, end = about["data_offsets"]
            if not 0 <= begin <= end <= len(body):
                raise ValueError(f"{name} ends at byte {end} of {len(body)}")
            parts[name] = body[begin:end]
    return parts


def _inflate(data: bytes) -> bytes:
    stream = zlib.decompressobj()
    text = stream.decompress(data, _MAX_LINES)
    if not stream.eof:
        raise ValueError("its lines are cut off")
    return text
