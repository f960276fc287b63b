"""Distributed checkpoint: output of ``torch.distributed.checkpoint`` as a run with one step of parameters.

``.metadata`` lists the tensors with their global shapes, and the chunks that the ranks wrote to ``__RANK_N.distcp``.
Each chunk is a ``torch.save`` archive inside a .distcp file. Both formats are read without torch and without executing
code. A tensor is assembled from its chunks on access; no other chunk is opened.

Megatron-LM (``--ckpt-format torch_dist``) stacks the parameters of all layers, and of all experts, along leading axes
of one tensor; here each slice gets the name of its module again. Optimizer states are not read.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np

from tapscope.core import dtypes
from tapscope.core.errors import RunCorruptError
from tapscope.run_format.index import Event, RankIndex, SiteInfo
from tapscope.run_format.payload import Array
from tapscope.run_format.record import FORWARD, Entry, Key, Record
from tapscope.run_format.tensor_layout import Tensor
from tapscope.sglang import torch_save_reader
from tapscope.sglang.safe_unpickler import Constructor, Placeholder, PlaceholderKey
from tapscope.tensor_files.checkpoint import checkpoint_manifest, site_of_weight
from tapscope.tensor_files.directory import FilePayloads, TensorDirectory
from tapscope.tensor_files.megatron_checkpoint import (
    METADATA,
    arguments,
    dims_of_parameter,
    has_gate,
    hyperparameters,
    is_tied,
    model_name,
    module_order,
    plain_name,
)

_COMMON = "common.pt"
_STATES = ("optimizer.", "optim.", "rng_state", "rerun_state")
"""Name prefixes of tensors that are not weights."""
_STACKED = re.compile(r"(?:^|\.)layers\.(?!\d)|\.experts\.experts\.")
"""Module lists whose parameters are stacked along the leading axes of one tensor."""
_MAX_AXES = 16
_MAX_TENSORS = 1_000_000


class _Properties(Placeholder):
    """``TensorProperties``, whose pickled state is a tuple that begins with the dtype."""

    def set_state(self, state: Any) -> None:
        if isinstance(state, tuple) and state:
            self["dtype"] = state[0]


_KNOWN = {
    ("torch.distributed.checkpoint.metadata", "TensorProperties"): Constructor(_Properties),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"): Constructor(PlaceholderKey),
}


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of a tensor, and the archive that stores it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of the checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]

    def chunks_at(self, first: tuple[int, ...]) -> tuple[_Chunk, ...]:
        """Return the chunks that contain elements with the leading indices ``first``."""
        return tuple(
            chunk
            for chunk in self.chunks
            if all(o <= i < o + n for i, o, n in zip(first, chunk.offsets, chunk.sizes, strict=False))
        )


class _Payloads(FilePayloads):
    """Tensors assembled from chunks."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.parts: dict[int, tuple[_Stored, tuple[int, ...]]] = {}
        """seq -> (tensor, leading indices of the slice that belongs to the record)."""

    def array(self, record: Record) -> Array:
        """See :class:`~tapscope.run_format.payload.Payloads`."""
        stored, first = self.parts[record.seq]
        chunks = stored.chunks_at(first)
        if len(chunks) == 1:
            return self._chunk(stored, chunks[0], first)
        whole: Array = np.empty(record.shape, dtypes.numpy_dtype(stored.dtype))
        for chunk in chunks:
            offsets, sizes = chunk.offsets[len(first) :], chunk.sizes[len(first) :]
            place = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            whole[place] = self._chunk(stored, chunk, first)
        return whole

    def _chunk(self, stored: _Stored, chunk: _Chunk, first: tuple[int, ...]) -> Array:
        """Read the elements of the chunk with the leading indices ``first``."""
        path = self._folder / chunk.file
        tensor = torch_save_reader.load_part(path, chunk.at, chunk.nbytes)
        if not isinstance(tensor, Tensor) or (tensor.dtype, tensor.shape) != (stored.dtype, chunk.sizes):
            kind = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else "no tensor"
            raise RunCorruptError(
                f"{path}: at byte {chunk.at:,}: expected {stored.dtype} {list(chunk.sizes)} of {stored.name} as in "
                f"{METADATA}, found {kind}"
            )
        local = tuple(i - o for i, o in zip(first, chunk.offsets, strict=False))
        part: Array = self.read(chunk.file, tensor)[local]
        return part

    def tail(self, record: Record) -> bytes | None:
        """Return None: the last bytes of a tensor may be in any chunk."""
        return None

    def flaw(self, record: Record) -> str | None:
        """See :class:`~tapscope.run_format.payload.Payloads`."""
        stored, first = self.parts[record.seq]
        for chunk in stored.chunks_at(first):
            is_damaged = torch_save_reader.damaged(self._folder / chunk.file, chunk.at, chunk.nbytes)
            if is_damaged is None:
                return None
            if is_damaged:
                return f"do not have the CRC-32 that their file says ({chunk.file}, byte {chunk.at:,})"
        return ""


def read_distributed_checkpoint(folder: Path) -> TensorDirectory:
    """Read the entries of ``.metadata``; chunks are read on access.

    A tensor with a missing or truncated chunk is reported as a problem of the run. Raises RunCorruptError without
    readable ``.metadata`` or weights.
    """
    if not (folder / METADATA).is_file():
        raise RunCorruptError(f"{folder}: has .distcp files but no {METADATA}: its save did not finish")
    args = arguments(torch_save_reader.load(folder / _COMMON, is_lenient=True)) if _has_common(folder) else {}
    index, payloads, skipped = RankIndex(), _Payloads(folder), list[str]()
    parts: dict[str, tuple[_Stored, tuple[int, ...]]] = {}
    for stored in _tensors(folder, index.problems, skipped):
        for name, first in _parts(stored):
            if _is_whole(stored, first):
                parts[plain_name(name)] = stored, first
            else:
                index.problems.append(f"{folder}: the chunks of {stored.name} overlap or leave gaps")
    payloads.damaged.extend(index.problems)
    if not parts:
        raise RunCorruptError(f"{folder}: no readable weights: {(index.problems or ['it lists no tensor'])[0]}")
    if is_tied(args) and "embedding.word_embeddings.weight" in parts:
        parts.setdefault("output_layer.weight", parts["embedding.word_embeddings.weight"])
    is_megatron, mesh = _has_common(folder), {"pp": 1, "tp": 1}
    for name in sorted(parts, key=module_order):
        stored, first = parts[name]
        site, seq, shape = site_of_weight(name), len(index.records), stored.shape[len(first) :]
        dims = dims_of_parameter(name, len(shape), has_gate(args)) if is_megatron else None
        chunk = stored.chunks_at(first)[0]
        entry = Entry(chunk.file, chunk.at, math.prod(shape) * dtypes.itemsize(stored.dtype))
        index.records.append(Record(Key(site, 0, 0, 0, 0, FORWARD), seq, stored.dtype, shape, dims, entry=entry))
        index.sites[site] = SiteInfo(site, "", {}, dims=dims)
        payloads.parts[seq] = stored, first
    index.events = [Event(0, "open", {"coords": dict.fromkeys(mesh, 0), "mesh": mesh}), Event(0, "close", {})]
    if skipped:
        index.events.insert(1, Event(0, "skipped", {"tensors": len(skipped), "reason": "optimizer and random states"}))
    index.add_step(0, len(index.records))
    framework = "megatron" if is_megatron else "checkpoint"
    manifest = checkpoint_manifest(framework, model_name(folder), mesh=mesh, model_config=hyperparameters(args))
    return TensorDirectory(manifest, {0: index}, payloads)


def _has_common(folder: Path) -> bool:
    """Return whether Megatron wrote the checkpoint: non-tensor values are in a separate file."""
    return (folder / _COMMON).is_file()


def _tensors(folder: Path, problems: list[str], skipped: list[str]) -> Iterator[_Stored]:
    """Yield the weights listed in ``.metadata`` whose chunks are all present.

    Errors of other weights are appended to ``problems``, names of optimizer and random states to ``skipped``.
    """
    path = folder / METADATA
    content = torch_save_reader.read_pickle(path, _KNOWN)
    listed, places = (_member(content, name) for name in ("state_dict_metadata", "storage_data"))
    if not isinstance(listed, dict) or not isinstance(places, dict) or len(listed) > _MAX_TENSORS:
        raise RunCorruptError(f"{path}: not the metadata of torch.distributed.checkpoint")
    where = {(_member(key, "fqn"), _tuple(_member(key, "offset"))): place for key, place in places.items()}
    sizes = {file.name: file.stat().st_size for file in folder.glob("*.distcp")}
    for name, one in listed.items():
        if not isinstance(name, str) or not isinstance(one, dict) or "size" not in one:
            continue
        if name.startswith(_STATES):
            skipped.append(name)
            continue
        try:
            yield _stored(folder, name, one, where, sizes)
        except RunCorruptError as error:
            if str(error) not in problems:
                problems.append(str(error))


def _stored(
    folder: Path, name: str, one: dict[str, Any], where: dict[tuple[Any, Any], Any], sizes: dict[str, int]
) -> _Stored:
    shape, dtype, listed = _tuple(one["size"]), _member(one.get("properties"), "dtype"), one.get("chunks")
    if shape is None or len(shape) > _MAX_AXES or str(dtype) not in dtypes.NAMES or not isinstance(listed, list):
        raise RunCorruptError(f"{folder / METADATA}: invalid entry for {name}")
    chunks = []
    for chunk in listed:
        offsets, extent = (_tuple(_member(chunk, part)) for part in ("offsets", "sizes"))
        if offsets is None or extent is None or not len(offsets) == len(extent) == len(shape):
            raise RunCorruptError(f"{folder / METADATA}: invalid chunk of {name}")
        if any(o + n > size for o, n, size in zip(offsets, extent, shape, strict=True)):
            raise RunCorruptError(f"{folder / METADATA}: a chunk of {name} is outside its shape {list(shape)}")
        place = where.get((name, offsets))
        file, at, nbytes = (_member(place, part) for part in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or not _is_count(at) or not _is_count(nbytes):
            raise RunCorruptError(f"{folder / METADATA}: no file and offset for the chunk of {name} at {list(offsets)}")
        if _member(place, "transform_descriptors"):
            raise RunCorruptError(f"{folder}: {name} was saved compressed or encrypted, which is not read")
        if file not in sizes:
            raise RunCorruptError(f"{folder}: {file[:80]} is missing, and with it its chunks")
        if at + nbytes > sizes[file]:
            end = at + nbytes
            raise RunCorruptError(f"{folder / file}: is cut off: {name} ends at byte {end:,} of {sizes[file]:,}")
        chunks.append(_Chunk(offsets, extent, file, at, nbytes))
    return _Stored(name, str(dtype), shape, tuple(chunks))


def _is_whole(stored: _Stored, first: tuple[int, ...]) -> bool:
    """Return whether every element with the leading indices ``first`` is in exactly one chunk."""
    axes = range(len(first), len(stored.shape))
    chunks = stored.chunks_at(first)
    for one, other in combinations(chunks, 2):
        shared = (
            min(one.offsets[a] + one.sizes[a], other.offsets[a] + other.sizes[a])
            - max(one.offsets[a], other.offsets[a])
            for a in axes
        )
        if all(extent > 0 for extent in shared):
            return False
    wanted = math.prod(stored.shape[len(first) :])
    return bool(chunks) and sum(math.prod(chunk.sizes[len(first) :]) for chunk in chunks) == wanted


def _parts(stored: _Stored) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (parameter name, leading indices in the tensor) for each module."""
    matches = list(_STACKED.finditer(stored.name))
    counts = stored.shape[: len(matches)]
    if not matches or len(counts) < len(matches) or math.prod(counts) > _MAX_TENSORS:
        yield stored.name, ()
        return
    for first in product(*map(range, counts)):
        name = stored.name
        for match, i in reversed(list(zip(matches, first, strict=True))):
            head = match[0].removesuffix("experts.") + ("local_experts." if ".experts." in match[0] else "")
            name = f"{name[: match.start()]}{head}{i}.{name[match.end() :]}"
        yield name, first


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _tuple(value: Any) -> tuple[int, ...] | None:
    return value if isinstance(value, tuple) and all(map(_is_count, value)) else None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62
