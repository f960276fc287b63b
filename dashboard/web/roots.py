"""Roots: the only runs that the web page reads."""

import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlencode

from tapscope.core.errors import DataError, RunNotFoundError
from tapscope.core.regular_files import read_small
from tapscope.dashboard.browse_source import RunSource
from tapscope.dashboard.model.permalink import Permalink
from tapscope.dashboard.model.run import RunSummary, record_key
from tapscope.dashboard.model.schema import to_json
from tapscope.dashboard.model.value_table import ValueTable
from tapscope.run_format.directory import may_grow
from tapscope.run_format.manifest import MANIFEST, MAX_MANIFEST_BYTES
from tapscope.run_format.record import Record

CACHED_RUNS = 4
"""Open runs, shared by all viewers."""
_SHORT_LINES = 64 << 10
"""Bytes of a file of lines that is read to see whether one of them is a record."""
CACHED_VIEWS = 8
"""Views of an open run, as JSON of at most some MB each."""


@dataclass(frozen=True, slots=True)
class LinkedPlace:
    """A page that a permalink names."""

    path: str
    """Of the run."""
    address: str


def tensor_address(run_id: str, link: Permalink) -> str:
    """Address of the page that shows the place of a link in this run."""
    words = urlencode({"run": run_id, "site": link.site, "step": link.step, "rank": link.rank})
    return f"/tensor/?{words}" + (f"#[{','.join(map(str, link.index))}]" if link.index else "")


class _OpenRun:
    """A run and what its viewers have asked for: many of them cost little more memory than one."""

    def __init__(self, stamp: tuple[int, int], source: RunSource) -> None:
        self.stamp, self.source = stamp, source
        self._views: OrderedDict[Hashable, bytes] = OrderedDict()
        self._lock = Lock()

    def json(self, key: Hashable, view: Callable[[RunSource], Any]) -> bytes:
        """See :meth:`Roots.json`; one view is made at a time."""
        with self._lock:
            body = self._views.get(key)
            if body is None:
                body = self._views[key] = to_json(view(self.source))
            self._views.move_to_end(key)
            while len(self._views) > CACHED_VIEWS:
                self._views.popitem(last=False)
            return body


class Roots:
    """Runs below the given paths: each path is a run, or a folder of runs. Symbolic links are not followed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises RunNotFoundError for a path that does not exist."""
        for path in paths:
            if not path.is_dir():
                what = "is a file" if path.exists() else "does not exist"
                raise RunNotFoundError(f"{path} {what}; give the directory of a run, or one that contains runs")
        self._paths = [path.resolve() for path in paths]
        self._known: dict[str, Path] = {}
        self._open: OrderedDict[str, _OpenRun] = OrderedDict()
        self._lock = Lock()

    def paths(self) -> dict[str, Path]:
        """Id -> run, newest first within a folder; those that were found are known to :meth:`path` afterwards."""
        paths: dict[str, Path] = {}
        for root in self._paths:
            folders = [root] if _is_run(root) else sorted(root.iterdir(), key=_modified, reverse=True)
            for folder in folders:
                if folder.is_dir() and not (folder.is_symlink() and folder != root) and _is_run(folder):
                    paths[_id(folder)] = _shown(folder)
        self._known = paths
        return paths

    @property
    def num_runs(self) -> int:
        """Runs that were found the last time."""
        return len(self._known)

    def path(self, run_id: str) -> Path:
        """Raises RunNotFoundError for an id that is not among the runs, and for a run with symbolic links in it."""
        path = self._known.get(run_id)
        if path is None or not _is_run(path) or path.is_symlink():
            path = self.paths().get(run_id)
        if path is None:
            raise RunNotFoundError("no such run; it may have been removed, or is not below the given paths")
        if link := next((each for each in (*path.glob("*"), *path.glob("rank-*/*")) if each.is_symlink()), None):
            raise RunNotFoundError(f"{link.name} in {path.name} is a symbolic link, which the web page does not follow")
        return path

    def summaries(self, offset: int = 0, limit: int | None = None) -> tuple[RunSummary, ...]:
        """Runs from the ``offset`` on, from their manifests alone; their number is :attr:`num_runs`."""
        shown = list(self.paths().items())[offset : None if limit is None else offset + limit]
        return tuple(_summary(run_id, path) for run_id, path in shown)

    def source(self, run_id: str) -> RunSource:
        """The run, read once until it changes; raises what open_run raises."""
        return self._opened(run_id).source

    def json(self, run_id: str, key: Hashable, view: Callable[[RunSource], Any]) -> bytes:
        """JSON of a view of a run, which is made once for all viewers until the run changes; ``key`` tells views
        apart."""
        return self._opened(run_id).json(key, view)

    def _opened(self, run_id: str) -> "_OpenRun":
        path = self.path(run_id)
        stamp = stamp_of(path)
        with self._lock:
            known = self._open.get(run_id)
            if known is None or known.stamp != stamp:
                known = self._open[run_id] = _OpenRun(stamp, RunSource.open(path))
            self._open.move_to_end(run_id)
            while len(self._open) > CACHED_RUNS:
                self._open.popitem(last=False)
            return known

    def record(self, run_id: str, site: str, step: int, rank: int, key: str = "") -> tuple[RunSource, Record]:
        """A record and its run; ``key`` is as :func:`~tapscope.dashboard.model.run.record_key`. Raises DataError."""
        source = self.source(run_id)
        records = source.of_site(site, step, rank)
        record = next((r for r in records if not key or record_key(r) == key), None)
        if record is None:
            raise DataError(f"no record of {site} in step {step} on rank {rank}")
        return source, record

    def places_of(self, link: Permalink) -> tuple[LinkedPlace, ...]:
        """Where a link leads, in every run of its name that has the record; raises DataError for none."""
        named = [(run_id, path) for run_id, path in self.paths().items() if path.name == link.run]
        places = [
            LinkedPlace(str(path), tensor_address(run_id, link))
            for run_id, path in named
            if len(self.source(run_id).of_site(link.site, link.step, link.rank))
        ]
        if not places:
            where = f"record of {link.site} in step {link.step} on rank {link.rank}" if named else "run of that name"
            raise DataError(f"{link}: no {where} below the given paths")
        return tuple(places)

    def table(self, run_id: str, site: str, step: int, rank: int, key: str = "") -> ValueTable:
        """All values of a record; raises DataError where none were kept."""
        source, record = self.record(run_id, site, step, rank, key)
        if record.entry is None:
            raise DataError(f"no values of {site} were kept in step {step}")
        return source.table(record)


def _shown(path: Path) -> Path:
    """Relative to the working directory where it is below that, so that commands on the page can be pasted."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) and path != Path.cwd() else path


def stamp_of(path: Path) -> tuple[int, int]:
    """Changes when a run grows or is replaced: bytes and newest modification of its lines."""
    stats = [file.stat() for file in path.glob("rank-*/records*") if not file.is_symlink()]
    stats.append((path / MANIFEST).stat()) if (path / MANIFEST).exists() else None
    return sum(each.st_size for each in stats), max((each.st_mtime_ns for each in stats), default=0)


def _is_run(path: Path) -> bool:
    manifest = path / MANIFEST
    return manifest.is_file() and not manifest.is_symlink()


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _id(path: Path) -> str:
    return sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _has_records(path: Path) -> bool:
    files = (file for file in path.glob("rank-*/records*") if not file.is_symlink())
    return any(file.stat().st_size > _SHORT_LINES or b'"type":"record"' in file.read_bytes() for file in files)


def _summary(run_id: str, path: Path) -> RunSummary:
    try:
        manifest = json.loads(read_small(path / MANIFEST, MAX_MANIFEST_BYTES))
    except (OSError, ValueError, RecursionError):
        manifest = None
    known = manifest if isinstance(manifest, dict) else {}
    problem = "unreadable" if not known else "" if _has_records(path) else "no records"
    model, framework, created = (str(known.get(name) or "") for name in ("model", "framework", "created"))
    return RunSummary(run_id, path.name, str(path), model, framework, created, may_grow(path), problem)
