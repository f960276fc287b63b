"""TensorDirectory: a directory of tensor files written by a user's script, read as a run.

A file contains one tensor, or nested containers of tensors whose keys are appended to the name. Steps, ranks and names
are parsed from the path, see :mod:`.file_pattern`. Files are ordered naturally by path, tensors by their order in the
file; ``{index}`` in the pattern defines the order explicitly.
"""

import os
import re
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tapscope.core.errors import RunCorruptError, RunNotFoundError
from tapscope.core.formatting import listed, plural
from tapscope.core.json_values import leaves, plain_value
from tapscope.run_format.index import Event, RankIndex, SiteInfo
from tapscope.run_format.manifest import INDEX, MANIFEST, MAX_RANKS
from tapscope.run_format.payload import Array
from tapscope.run_format.record import BACKWARD, FORWARD, Entry, Key, Record
from tapscope.run_format.tensor_layout import Tensor, view
from tapscope.sglang.pickle_template import PickleTemplates
from tapscope.sglang.reader import DumpPayloads
from tapscope.sglang.zip_archive import FileEnd
from tapscope.tensor_files.file_pattern import SUFFIXES, FileFields, FilePattern, fields_of
from tapscope.tensor_files.site_names import site_of_tensor
from tapscope.tensor_files.tensor_file import Deflated, inflate, read_tensor_file

UNKNOWN = "tensor files do not record what was lost"
ORDER = "tensor files do not record what was lost; tensors are ordered by file name, not by execution"
_MAX_DEPTH = 4
"""Maximum depth of searched subdirectories."""
_MAX_INFLATED = 4
"""Maximum number of decompressed arrays cached in memory."""
_NUMBERS = re.compile(r"(\d{1,18})")


@dataclass(frozen=True, slots=True)
class TensorDirectory:
    """The contents of a directory of tensor files or of a checkpoint."""

    manifest: dict[str, Any]
    ranks: dict[int, RankIndex]
    payloads: "FilePayloads"


class FilePayloads(DumpPayloads):
    """The tensors in the files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.deflated: dict[tuple[int, int], Deflated] = {}
        """(rank, seq) -> compressed array."""
        self._inflated: OrderedDict[tuple[int, int], Array] = OrderedDict()

    def array(self, record: Record) -> Array:
        """See :class:`~tapscope.run_format.payload.Payloads`."""
        place = record.key.rank, record.seq
        one = self.deflated.get(place)
        if one is None:
            return super().array(record)
        assert record.entry is not None
        with self._lock:
            array = self._inflated.get(place)
        if array is None:
            array = view(np.frombuffer(inflate(self._folder / record.entry.file, one), np.uint8), one.tensor)
            with self._lock:
                self._inflated[place] = array
                if len(self._inflated) > _MAX_INFLATED:
                    self._inflated.popitem(last=False)
        return array

    def flaw(self, record: Record) -> str | None:
        """See :class:`~tapscope.run_format.payload.Payloads`; only ZIP archives have checksums."""
        assert record.entry is not None
        if (record.key.rank, record.seq) in self.deflated or not record.entry.file.endswith((".pt", ".pth", ".npz")):
            return None
        return super().flaw(record)


def has_tensor_files(folder: Path) -> bool:
    """Return whether ``folder`` or a subdirectory contains a tensor file."""
    return next(_files(folder), None) is not None


def read_directory(folder: Path, pattern: str | None = None) -> TensorDirectory:
    """Read the headers of every file below ``folder`` that matches ``pattern``; payloads are read on access.

    An unreadable file is reported as a problem of its rank. Raises ConfigError for an invalid pattern, RunNotFoundError
    if no file matches, and RunCorruptError if no file is readable.
    """
    names = list(_files(folder))
    chosen = FilePattern(pattern) if pattern is not None else None
    fields = {name: chosen.fields(name) if chosen else fields_of(name) for name in names}
    matched = {name: one for name, one in fields.items() if one is not None}
    if not matched:
        suffixes = ", ".join(SUFFIXES)
        there = f"it has {listed(sorted(names), 3)}" if names else f"it has no file with suffix {suffixes}"
        raise RunNotFoundError(f"no file in {folder} matches {pattern!r}; {there}" if pattern else f"{folder}: {there}")
    reader = _Reader(folder)
    for name in sorted(matched, key=lambda name: _order(name, matched[name])):
        reader.add(name, matched[name])
    left_out = [name for name in names if fields[name] is None]
    return reader.finish(left_out, is_ordered=all(one.index is not None for one in matched.values()))


def read_one_file(path: Path) -> TensorDirectory:
    """Read a single file as a run; keys in the file name the tensors. Raises RunCorruptError."""
    reader = _Reader(path.parent)
    reader.add(path.name, FileFields())
    return reader.finish([], is_ordered=True)


def _files(folder: Path) -> Iterator[str]:
    """Yield paths relative to ``folder``, without hidden files and directories and without tapscope runs."""
    for root, folders, files in os.walk(folder):
        if INDEX in files or MANIFEST in files:
            folders.clear()
            continue
        inside = os.path.relpath(root, folder)
        prefix = "" if inside == "." else f"{inside}/"
        folders[:] = [name for name in folders if not name.startswith(".")] if prefix.count("/") < _MAX_DEPTH else []
        yield from (prefix + name for name in files if name.endswith(SUFFIXES) and not name.startswith("."))


def _order(name: str, fields: FileFields) -> tuple[Any, ...]:
    return fields.rank, fields.step, -1 if fields.index is None else fields.index, natural_order(name)


def natural_order(name: str) -> tuple[int | str, ...]:
    """Return a sort key that orders ``layers.10`` after ``layers.9``."""
    return tuple(int(part) if part.isdecimal() else part for part in _NUMBERS.split(name))


class _Reader:
    """Converts files to records."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks: dict[int, RankIndex] = {}
        self._payloads = FilePayloads(folder)
        self._templates = PickleTemplates()
        self._calls: Counter[tuple[str, int, int]] = Counter()
        self._per_step: Counter[tuple[int, int]] = Counter()

    def add(self, file: str, fields: FileFields) -> None:
        rank = min(fields.rank, MAX_RANKS)
        index = self._ranks.setdefault(rank, RankIndex())
        path = self._folder / file
        try:
            content, read = read_tensor_file(path, self._templates)
            # Keys with a dot, as in a state dict, are full names; others are appended to the name of the file.
            is_named = isinstance(content, dict) and any("." in str(key) for key in content)
            for inner, leaf in leaves(content):
                name = ".".join(filter(None, ("" if is_named else fields.name, inner))) or "tensor"
                self._record(index, rank, fields.step, site_of_tensor(name, fields.layer), file, leaf, read)
        except (RunCorruptError, ValueError) as error:
            problem = str(error) if isinstance(error, RunCorruptError) else f"{path}: {error}"
            index.problems.append(problem)
            self._payloads.damaged.append(problem)

    def _record(
        self, index: RankIndex, rank: int, step: int, site: str, file: str, leaf: Any, read: FileEnd | None
    ) -> None:
        key = Key(site, step, rank, self._calls[site, step, rank], 0, BACKWARD if site.endswith(".grad") else FORWARD)
        self._calls[site, step, rank] += 1
        seq = len(index.records)
        tensor = leaf.tensor if isinstance(leaf, Deflated) else leaf
        if isinstance(tensor, Tensor):
            offset = leaf.offset if isinstance(leaf, Deflated) else tensor.offset
            entry = Entry(file, offset, tensor.nbytes)
            index.records.append(Record(key, seq, tensor.dtype, tensor.shape, entry=entry))
            if isinstance(leaf, Deflated):
                self._payloads.deflated[rank, seq] = leaf
            elif not tensor.is_contiguous:
                self._payloads.non_contiguous[rank, seq] = tensor
            elif read is not None:
                self._payloads.keep(file, tensor, read)
        else:
            index.records.append(Record(key, seq, None, (), value=plain_value(leaf)))
        index.sites.setdefault(site, SiteInfo(site, "", {}))
        self._per_step[rank, step] += 1

    def finish(self, left_out: list[str], *, is_ordered: bool) -> TensorDirectory:
        problems = [problem for index in self._ranks.values() for problem in index.problems]
        if not any(index.records for index in self._ranks.values()):
            raise RunCorruptError(f"{self._folder} has no readable tensor: {(problems or ['its files are empty'])[0]}")
        for rank, index in self._ranks.items():
            index.events = [Event(rank, "open", {}), Event(rank, "close", {})]
            index.unknown.append(UNKNOWN if is_ordered else ORDER)
            if left_out:
                files, names = plural(len(left_out), "file"), listed(sorted(left_out), 3)
                index.unknown.append(f"{files} in {self._folder} do not match the pattern: {names}")
            for (owner, step), count in self._per_step.items():
                if owner == rank:
                    index.add_step(step, count)
        manifest = {"version": 1, "format": "tensor-files", "framework": "", "model": "", "dtype": "", "mesh": {}}
        return TensorDirectory(manifest | {"world_size": max(self._ranks) + 1}, self._ranks, self._payloads)
