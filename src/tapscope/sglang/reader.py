"""Dump: a directory written by SGLang's dumper, read as a run.

Each value is one ``torch.save`` file, named by its tags (see :mod:`.filenames`), with the content ``{"value": ...,
"meta": {...}}``. ``meta`` repeats the tags and adds the parallel info of the rank, and dims. The directory has no
ledger, only a consecutive ``dump_index`` per rank: a missing index is reported as a problem of the rank. Values missing
after the last file cannot be detected, and the ledger reports this.
"""

import mmap
import os
import resource
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from tapscope.core import dtypes
from tapscope.core.errors import RunCorruptError, RunNotFoundError
from tapscope.core.formatting import plural
from tapscope.core.json_values import leaves, plain_value
from tapscope.core.regular_files import open_regular, reading
from tapscope.run_format.index import Event, RankIndex, SiteInfo
from tapscope.run_format.manifest import MANIFEST, MAX_RANKS
from tapscope.run_format.payload import TAIL, Array
from tapscope.run_format.record import Entry, Key, Record
from tapscope.run_format.records import Records
from tapscope.run_format.tensor_layout import Tensor, packed, view
from tapscope.sglang import torch_save_reader
from tapscope.sglang.filenames import CORE, are_dump_tags, is_dump_name, site_of, tags_of_name
from tapscope.sglang.logits_rows import LOGITS, LogitsRows
from tapscope.sglang.metadata import framework_of, number, own_tags, parallel_info, pass_of, scalars_of
from tapscope.sglang.pickle_template import PickleTemplates
from tapscope.sglang.zip_archive import FileEnd

UNKNOWN = "an SGLang dump keeps no account: whether everything that was asked for was written cannot be known"
REPEATED = "arguments of the model that its inner modules got unchanged were dumped again under one name: left out"
ONLY_ARGUMENTS = (
    "it holds only arguments of the model, as SGLang's mode core writes: dump with DUMPER_NON_INTRUSIVE_MODE=all, "
    "or with dump() in the model"
)
_MAX_GAPS = 8
_CORE_SITES = frozenset(site_of(name, {}) for name in CORE)
_MAX_PEERS = 8
"""Maximum number of ranks compared with a rank that may have been stopped."""
_MAP_FROM = 1 << 16
"""Size in bytes from which a tensor is memory-mapped; reading smaller tensors is faster."""
_MAX_MAPPED = 256
"""Maximum number of mapped files. Each uses a file descriptor, so at most an eighth of the process's limit is used."""
_MAX_KEPT = 32 << 20
"""Maximum number of tensor bytes cached from small files when they are opened."""


def find_dump(path: Path) -> Path | None:
    """Return the directory with the dumped files: ``path`` itself, or its only subdirectory with dumped files; None if
    there is none.

    Raises RunNotFoundError if several subdirectories qualify: the caller must choose one.
    """
    if (path / MANIFEST).exists() or not path.is_dir():
        return None
    if _has_files(path):
        return path
    inner = sorted(entry for entry in path.iterdir() if entry.is_dir() and _has_files(entry))
    if len(inner) > 1:
        names = ", ".join(entry.name for entry in inner[:4]) + (", …" if len(inner) > 4 else "")
        raise RunNotFoundError(f"{path} holds {len(inner)} SGLang dumps ({names}); give one of them")
    return inner[0] if inner else None


def _has_files(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(is_dump_name(entry.name) for entry in entries)
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Dump:
    """The contents of a directory written by SGLang's dumper."""

    manifest: dict[str, Any]
    ranks: dict[int, RankIndex]
    payloads: "DumpPayloads"


class DumpPayloads:
    """The tensors in the dumped files: small files are cached, the most recently used large files stay mapped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._checked: dict[str, list[tuple[int, int, str]] | None] = {}
        self.non_contiguous: dict[tuple[int, int], Tensor] = {}
        """(rank, seq) -> non-contiguous tensor."""
        self.damaged: list[str] = []
        """One message per file that cannot be read."""
        self.has_checksums = True
        self._mapped: OrderedDict[str, Array] = OrderedDict()
        self._max_mapped = min(_MAX_MAPPED, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
        self._lock = Lock()
        self._kept: dict[tuple[str, int], bytes] = {}
        """(file, offset) -> bytes of a tensor."""
        self._num_kept = 0
        self._tails: dict[tuple[str, int, int], bytes] = {}
        """(file, offset, number of bytes) -> last bytes of a tensor in a large file."""

    def array(self, record: Record) -> Array:
        """See :class:`~tapscope.run_format.payload.Payloads`."""
        entry = record.entry
        assert entry is not None
        assert record.dtype is not None
        kept = self._kept.get((entry.file, entry.offset))
        if kept is not None and len(kept) == entry.nbytes:
            return np.ndarray(record.shape, dtypes.numpy_dtype(record.dtype), kept)
        if (record.key.rank, record.seq) not in self.non_contiguous and entry.nbytes >= _MAP_FROM:
            with suppress(OSError, ValueError, TypeError):  # read() below raises the specific error
                return np.ndarray(record.shape, dtypes.numpy_dtype(record.dtype), self._map(entry.file), entry.offset)
        return self.read(entry.file, self._tensor(record))

    def keep(self, name: str, tensor: Tensor, read: FileEnd) -> None:
        """Cache the bytes of a contiguous tensor if the whole file was read, otherwise its last bytes if those were
        read."""
        if not tensor.nbytes:
            return
        if not read.start and self._num_kept + tensor.nbytes <= _MAX_KEPT:
            self._num_kept += tensor.nbytes
            self._kept[name, tensor.offset] = read.data[tensor.offset : tensor.end]
        elif (begin := tensor.end - min(tensor.nbytes, TAIL) - read.start) >= 0:
            self._tails[name, tensor.offset, tensor.nbytes] = read.data[begin : tensor.end - read.start]

    def tail(self, record: Record) -> bytes | None:
        """See :class:`~tapscope.run_format.payload.Payloads`."""
        entry = record.entry
        assert entry is not None
        if (record.key.rank, record.seq) in self.non_contiguous:
            return None
        kept = self._kept.get((entry.file, entry.offset))
        if kept is not None and len(kept) == entry.nbytes:
            return kept[-TAIL:]
        return self._tails.get((entry.file, entry.offset, entry.nbytes))

    def _tensor(self, record: Record) -> Tensor:
        assert record.entry is not None
        assert record.dtype is not None
        non_contiguous = self.non_contiguous.get((record.key.rank, record.seq))
        return non_contiguous or packed(record.dtype, record.shape, record.entry.offset)

    def read(self, name: str, tensor: Tensor) -> Array:
        """Read a tensor from a file; raises RunCorruptError if the file was truncated or removed."""
        path = self._folder / name
        try:
            if tensor.end - tensor.offset >= _MAP_FROM:
                return view(self._map(name), tensor)
            with reading(path) as file:
                data = os.pread(file.fileno(), tensor.end - tensor.offset, tensor.offset)
                return view(np.frombuffer(data, np.uint8), replace(tensor, offset=0))
        except (OSError, ValueError, TypeError) as error:
            why = getattr(error, "strerror", None) or error
            raise RunCorruptError(f"{path}: cannot be read any more: {why}") from None

    def _map(self, name: str) -> Array:
        """Memory-map a whole file with populated pages: page faults would cost as much as summing the data."""
        with self._lock:
            data = self._mapped.pop(name, None)
            if data is None:
                fd = open_regular(f"{self._folder}/{name}")
                try:
                    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
                    mapped = mmap.mmap(fd, 0, flags=flags, prot=mmap.PROT_READ)
                finally:
                    os.close(fd)
                data = np.frombuffer(mapped, np.uint8)
            self._mapped[name] = data
            if len(self._mapped) > self._max_mapped:
                self._mapped.popitem(last=False)
            return data

    def file(self, record: Record, end: int) -> None:
        """Return None: a tensor may be a view of a part of its storage."""

    def lacks(self, record: Record) -> str:
        """Return an empty string: see :meth:`missing`."""
        return ""

    def suspects(self, records: Records) -> Array:
        """Return an empty array: no payload is suspect."""
        return np.empty(0, np.int64)

    def flaw(self, record: Record) -> str | None:
        """See :class:`~tapscope.run_format.payload.Payloads`; the ZIP archive has a CRC-32 of each storage."""
        assert record.entry is not None
        name = record.entry.file
        if name not in self._checked:
            self._checked[name] = torch_save_reader.damaged(self._folder / name)
        damaged_spans = self._checked[name]
        if damaged_spans is None:
            return None
        tensor = self._tensor(record)
        bad = [member for begin, end, member in damaged_spans if begin < tensor.end and tensor.offset < end]
        return f"do not have the CRC-32 that their file says ({bad[0]})" if bad else ""

    def missing(self, records: Records) -> list[str]:
        """Return an empty list: every file was opened when the directory was read."""
        return []

    def close(self) -> None:
        """Drop the mapped files; arrays still in use keep their mapping."""
        with self._lock:
            self._mapped.clear()


def read_dump(folder: Path) -> Dump:
    """Read the tags and meta of every file; payloads are read on access.

    An unreadable file is reported as a problem of its rank. Raises RunCorruptError if no file is readable.
    """
    tags_of = dict(_file_names(folder))
    dump = Dump({}, {}, DumpPayloads(folder))
    reader = _Reader(folder, dump)
    for name in sorted(tags_of, key=lambda name: _order(name, tags_of[name])):
        reader.add(name, tags_of[name])
    if not any(index.records for index in dump.ranks.values()):
        problems = [problem for index in dump.ranks.values() for problem in index.problems]
        raise RunCorruptError(f"{folder} is an SGLang dump without a readable value: {(problems or ['no file'])[0]}")
    reader.finish()
    return dump


def _file_names(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (relative name, tags) of each file; a ``/`` in a dumped name creates subdirectories."""
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if "___" in name]
        inside = os.path.relpath(root, folder)
        prefix = "" if inside == "." else f"{inside}/"
        for file in files:
            tags = tags_of_name((name := prefix + file).removesuffix(".pt"))
            if file.endswith(".pt") and are_dump_tags(tags):
                yield name, tags


def _order(name: str, tags: Mapping[str, str]) -> tuple[int, int, str]:
    return number(tags.get("rank")) or 0, number(tags.get("dump_index")) or 0, name


class _Reader:
    """Converts files to records, in dump order per rank."""

    def __init__(self, folder: Path, dump: Dump) -> None:
        self._folder, self._dump = folder, dump
        self._meta: dict[int, Mapping[str, Any]] = {}
        self._firings: Counter[tuple[object, ...]] = Counter()
        self._per_step: Counter[tuple[int, int]] = Counter()
        self._numbers: dict[int, dict[int, str]] = {}
        """rank -> ``dump_index`` -> file; the dumper increments the index by one per file."""
        self._same_numbers: dict[int, list[tuple[str, str]]] = {}
        """rank -> pairs of files with the same ``dump_index``."""
        self._templates = PickleTemplates()
        self._arguments: dict[tuple[str, int, int], object] = {}
        """(site, step, rank) -> form of the model argument dumped there first."""
        self._logits_rows = LogitsRows(dump.payloads.read)

    def add(self, name: str, tags: dict[str, Any]) -> None:
        rank = min(number(tags.get("rank")) or 0, MAX_RANKS)
        if (at := number(tags.get("dump_index"))) is not None:
            first = self._numbers.setdefault(rank, {}).setdefault(at, name)
            if first != name:
                self._same_numbers.setdefault(rank, []).append((first, name))
        index = self._dump.ranks.setdefault(rank, RankIndex())
        path = f"{self._folder}/{name}"
        try:
            content, read = torch_save_reader.load_with_end(path, self._templates)
            meta: dict[str, Any] = {}
            if isinstance(content, dict) and "value" in content:
                meta = scalars_of(content.get("meta"))
                content = content["value"]
            tags |= meta
            self._meta.setdefault(rank, meta)
            self._record(index, rank, name, tags, content, read)
        except (RunCorruptError, ValueError, OSError) as error:
            sentence = str(error) if isinstance(error, RunCorruptError) else f"{path}: {error}"
            index.problems.append(sentence)
            self._dump.payloads.damaged.append(sentence)

    def _record(self, index: RankIndex, rank: int, file: str, tags: dict[str, Any], value: Any, read: FileEnd) -> None:
        name, step = str(tags.get("name", "(unnamed)")), number(tags.get("step")) or 0
        site, pass_ = site_of(name, tags), pass_of(name, tags)
        dims = tags.get("dims")
        parts = list(leaves(value))
        if name in CORE and self._is_repeated((site, step, rank), file, parts):
            if REPEATED not in index.unknown:
                index.unknown.append(REPEATED)
            return
        if name in CORE:
            self._logits_rows.note_argument(name, (step, rank), file, value)
        own = own_tags(tags)
        dims = dims if isinstance(dims, str) else None
        for path, leaf in parts:
            here = site_within(site, path)
            firing = (here, step, rank, pass_)
            key = Key(here, step, rank, self._firings[firing], 0, pass_)
            self._firings[firing] += 1
            seq = len(index.records)
            rows = None
            if isinstance(leaf, Tensor) and here.endswith(f"[{LOGITS}]"):
                rows = self._logits_rows.rows_of((step, rank), leaf.shape)
            if not isinstance(leaf, Tensor):
                index.records.append(Record(key, seq, None, (), value=plain_value(leaf), tags=own))
            elif own is not None or rows is not None:
                entry = Entry(file, leaf.offset, leaf.nbytes)
                index.records.append(Record(key, seq, leaf.dtype, leaf.shape, dims, rows=rows, entry=entry, tags=own))
            else:
                index.records.add_bare(key, seq, leaf.dtype, leaf.shape, dims, file, leaf.offset, leaf.nbytes)
            if isinstance(leaf, Tensor):
                if leaf.is_contiguous:
                    self._dump.payloads.keep(file, leaf, read)
                else:
                    self._dump.payloads.non_contiguous[rank, seq] = leaf
            if here not in index.sites:
                index.sites[here] = SiteInfo(here, "", {}, dims=dims if isinstance(leaf, Tensor) else None)
            self._per_step[rank, step] += 1

    def _is_repeated(self, place: tuple[str, int, int], file: str, parts: list[tuple[str, Any]]) -> bool:
        """Return whether this is an argument of the model that an inner module received unchanged."""
        form = [(path, self._comparable(file, leaf)) for path, leaf in parts]
        is_repeated = form == self._arguments.get(place)
        self._arguments.setdefault(place, form)
        return is_repeated

    def _comparable(self, file: str, leaf: Any) -> object:
        """Return a value that is equal for equal leaves."""
        if not isinstance(leaf, Tensor):
            return plain_value(leaf)
        data = np.ascontiguousarray(self._dump.payloads.read(file, leaf)).reshape(-1).view(np.uint8)
        return leaf.dtype, leaf.shape, blake2b(data.data).digest()

    def finish(self) -> None:
        """Set steps, ranks and the manifest after all files have been added."""
        steps = sorted({step for _, step in self._per_step})
        mesh: dict[str, int] = {}
        sites = {site for index in self._dump.ranks.values() for site in index.sites}
        if sites <= _CORE_SITES:
            next(iter(self._dump.ranks.values())).problems.append(ONLY_ARGUMENTS)
        stages = {rank: parallel_info(self._meta.get(rank, {}))[1].get("pp", 0) for rank in self._dump.ranks}
        first = min((min(numbers) for numbers in self._numbers.values()), default=0)
        for rank, index in self._dump.ranks.items():
            if same := self._same_numbers.get(rank):
                index.problems.append(
                    f"rank {rank} of {self._folder} has {plural(len(same), 'file')} with the dump_index of another, "
                    f"e.g. {same[0][0]} and {same[0][1]}: two processes, or one after reset(), dumped there"
                )
            if gaps := _gaps(self._numbers.get(rank, {}), first):
                index.problems.append(f"rank {rank} of {self._folder} lacks the files of dump_index {gaps}")
            sizes, coords = parallel_info(self._meta.get(rank, {}))
            mesh |= sizes
            index.events = [Event(rank, "open", {"coords": coords, "mesh": sizes}), Event(rank, "close", {})]
            index.unknown += [UNKNOWN, *self._stopped(rank, stages)]
            for step in steps:
                if count := self._per_step[rank, step]:
                    index.add_step(step, count)
        self._dump.manifest.update(self._manifest(mesh))

    def _stopped(self, rank: int, stages: Mapping[int, int]) -> list[str]:
        """Return a message if the rank may have been stopped, otherwise an empty list.

        This is the case if the sites of its last step are a proper prefix of those of another rank of the same pipeline
        stage.
        """
        if not self._dump.ranks[rank].records:
            return []
        step = int(self._dump.ranks[rank].records.step[-1])
        count = self._per_step[rank, step]
        longer = [r for r, stage in stages.items() if stage == stages[rank] and self._per_step[r, step] > count]
        mine = _sites(self._dump.ranks[rank], step) if longer else []
        for other in longer[:_MAX_PEERS]:
            theirs = _sites(self._dump.ranks[other], step)
            if mine == theirs[: len(mine)]:
                return [
                    f"rank {rank} has the first {len(mine):,} of the {len(theirs):,} values of rank {other} in step "
                    f"{step}: it may have been stopped"
                ]
        return []

    def _manifest(self, mesh: dict[str, int]) -> dict[str, Any]:
        metas = list(self._meta.values())
        worlds = [size for meta in metas if (size := number(meta.get("world_size"))) and size <= MAX_RANKS]
        models = [Path(path).name for meta in metas if isinstance(path := meta.get("tokenizer_path"), str)]
        return {
            "version": 1,
            "format": "sglang-dump",
            "framework": framework_of(metas),
            "model": models[0] if models else "",
            "dtype": "",
            "mesh": mesh,
            "world_size": max(worlds, default=len(self._dump.ranks)),
        }


def _sites(index: RankIndex, step: int) -> list[str]:
    places = np.flatnonzero(np.asarray(index.records.step) == step)
    return [index.records.site_at(int(place)) for place in places]


def _gaps(numbers: Iterable[int], first: int) -> str:
    """Format the gaps in numbers that count up from ``first`` as ranges, e.g. ``3, 7-9``; empty if there is no gap."""
    known = sorted(numbers)
    spans = [(one + 1, two - 1) for one, two in pairwise([first - 1, *known]) if two - one > 1]
    some = ", ".join(str(begin) if begin == end else f"{begin}-{end}" for begin, end in spans[:_MAX_GAPS])
    return some + (
        f" and {sum(end - begin + 1 for begin, end in spans[_MAX_GAPS:]):,} more" if spans[_MAX_GAPS:] else ""
    )


def site_within(site: str, path: str) -> str:
    """Return the site of a part of a value: ``:tap[x]`` -> ``:tap[x.path]``, ``:out`` -> ``:out[path]``."""
    if not path:
        return site
    stem, grad = site.removesuffix(".grad"), ".grad" if site.endswith(".grad") else ""
    return f"{stem[:-1]}.{path}]{grad}" if stem.endswith("]") else f"{stem}[{path}]{grad}"
