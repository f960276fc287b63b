"""StoredTensors: tensors by name, in a (sharded) safetensors checkpoint or in memory.

Layout: `model.safetensors`, or several files named by the `weight_map` of `model.safetensors.index.json`
(https://huggingface.co/docs/safetensors).
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tapscope.core.errors import CheckpointError
from tapscope.engine.checkpoint.received_weights import ReceivedWeights, WeightSource
from tapscope.engine.params.json_file import lfs_pointer_error

INDEX = "model.safetensors.index.json"
"""Index of a sharded checkpoint, which maps each tensor to a file."""
SINGLE = "model.safetensors"
"""Weight file of a checkpoint without an index."""


class StoredTensors:
    """Tensors of open files, created by :func:`open_tensors` and valid within its ``with`` block."""

    def __init__(self, folder: Path, handles: Mapping[str, Any], stored: Mapping[str, tuple[str, str]]) -> None:
        """``handles`` maps file names to open files; ``stored`` maps tensor names to (file, name in the file)."""
        self.folder = folder
        self._handles = handles
        self._stored = stored
        self._identities: dict[str, tuple[int, int, int]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def file_of(self, name: str) -> str:
        """Return the path of the file that contains ``name``, for messages."""
        return str(self.folder / self._stored[name][0])

    def where(self, name: str) -> str:
        """Return "NAME in FILE", for messages."""
        return f"{name} in {self.file_of(name)}"

    def get_slice(self, name: str) -> Any:
        """Return the safetensors slice of a tensor, which has shape and dtype; raises CheckpointError."""
        file, stored = self._stored[name]
        with self._errors(name):
            return self._handles[file].get_slice(stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; raises CheckpointError."""
        return tuple(self.get_slice(name).get_shape())

    def get_tensor(self, name: str) -> Tensor:
        """Read a whole tensor; raises CheckpointError."""
        file, stored = self._stored[name]
        with self._errors(name):
            tensor: Tensor = self._handles[file].get_tensor(stored)
        return tensor

    def part(self, name: str, dim: int, start: int, count: int, index: int | None = None) -> Tensor:
        """Read [start, start + count) along ``dim`` of a tensor, or of matrix ``index`` of a stack.

        Raises CheckpointError.
        """
        axes = (slice(None),) * dim + (slice(start, start + count),)
        stored = self.get_slice(name)
        with self._errors(name):
            piece: Tensor = stored[axes if index is None else (index, *axes)]
        return piece

    def remember_files(self) -> None:
        """Record inode, size and modification time of all open files, for :meth:`check_unchanged`."""
        self._identities = {file: _identity(self.folder / file) for file in self._handles}

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file has changed since it was opened, as old and new weights may then be mixed."""
        for file, identity in self._identities.items():
            if _identity(self.folder / file) != identity:
                raise CheckpointError(f"{self.folder / file} was modified during loading; load it again")

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except SafetensorError as error:
            raise CheckpointError(f"{self.where(name)} cannot be read: {error}") from None


@contextmanager
def open_tensors(
    source: WeightSource, prefixes: Mapping[str, str] | None = None, *, file: str | None = None
) -> Iterator[StoredTensors]:
    """Context manager: open every weight file of a directory, or tensors in memory.

    ``prefixes`` maps prefixes of stored names to the prefixes under which the tensors are read. With ``file`` only that
    file is opened. The CheckpointError names file and tensor.
    """
    if isinstance(source, ReceivedWeights):
        yield StoredTensors(Path(), source.handles, _by_name(source.files, prefixes))
        return
    with ExitStack() as stack:
        index = _read_index(source) if file is None else {}
        single = file or SINGLE
        handles: dict[str, Any] = {}
        for part in dict.fromkeys(index.values()) if index else [single]:
            handles[part] = stack.enter_context(_open(source / part, index))
        files = index or dict.fromkeys(handles[single].keys(), single)
        held = {part: set(handle.keys()) for part, handle in handles.items()}
        for name, part in files.items():
            if name not in held[part]:
                raise CheckpointError(f"{source / INDEX} maps {name} to {part}, but that file has no such tensor")
        tensors = StoredTensors(source, handles, _by_name(files, prefixes))
        tensors.remember_files()
        yield tensors


def _by_name(files: Mapping[str, str], prefixes: Mapping[str, str] | None) -> dict[str, tuple[str, str]]:
    """Map each name (with its prefix replaced) to (file, stored name)."""
    return {renamed(stored, prefixes or {}): (file, stored) for stored, file in files.items()}


def renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """Return ``name`` with its prefix replaced by the first matching entry of ``prefixes``."""
    prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
    return prefixes[prefix] + name.removeprefix(prefix) if prefix else name


def _identity(path: Path) -> tuple[int, int, int]:
    """Return inode, size and modification time, which change when the file is replaced or written."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _read_index(folder: Path) -> dict[str, str]:
    """Read the index as {tensor name: file name}; empty if the checkpoint has no index."""
    path = folder / INDEX
    if not path.exists():
        return {}
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} has no readable weight_map: {error!r}") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map must be a JSON object that names at least one tensor")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{path}: weight_map maps {name} to {file!r}; it must be a file name in {folder}")
    return weight_map


def _open(path: Path, index: dict[str, str]) -> Any:
    if not path.is_file():
        raise _missing(path, [name for name, file in index.items() if file == path.name])
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        reason = lfs_pointer_error(path) or _truncated_tensor(path) or f"{path} is not a safetensors file: {error}"
        raise CheckpointError(reason) from None


def _missing(path: Path, tensors: list[str]) -> CheckpointError:
    """Create the error for a missing file; ``tensors`` are the tensors that the index maps to it."""
    if tensors:
        return CheckpointError(f"{path} is missing; it contains {tensors[0]} and {len(tensors) - 1} more tensors")
    shards = sorted(path.parent.glob("*.safetensors")) if path.name == SINGLE else []
    if shards:
        index = path.parent / INDEX
        return CheckpointError(f"{index} is missing; it names the file of each tensor, such as {shards[0].name}")
    return CheckpointError(f"{path} is missing; weights must be safetensors")


def _truncated_tensor(path: Path) -> str | None:
    """Return a message that names the first tensor beyond the end of a truncated file; None if not truncated."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if size < 8 or header_size > size - 8:
            return f"{path} is truncated: its {size} bytes are fewer than its header needs"
        try:
            header = json.loads(file.read(header_size))
            ends = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
            first = min((end, name) for name, end in ends.items() if 8 + header_size + end > size)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return None
    return f"{path} is truncated: {first[1]} ends at byte {8 + header_size + first[0]} but the file has {size}"
