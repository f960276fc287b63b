"""Access to the runs below the given paths; the web page reads no other runs."""

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
"""Maximum number of open runs, shared by all viewers."""
_SHORT_LINES = 64 << 10
"""File size up to which a lines file is searched for a record; a larger one is assumed to have records."""
CACHED_VIEWS = 8
"""Maximum number of cached views per open run; each is JSON of a few MB at most."""


@dataclass(frozen=True, slots=True)
class LinkedPlace:
    """Target of a permalink on the web page."""

    path: str
    """Path of the run."""
    address: str


def tensor_address(run_id: str, link: Permalink) -> str:
    """Return the address of the page that shows the place of a permalink in this run."""
    words = urlencode({"run": run_id, "site": link.site, "step": link.step, "rank": link.rank})
    return f"/tensor/?{words}" + (f"#[{','.join(map(str, link.index))}]" if link.index else "")


class _OpenRun:
    """Open run with cached views, so that many viewers need little more memory than one."""

    def __init__(self, stamp: tuple[int, int], source: RunSource) -> None:
        self.stamp, self.source = stamp, source
        self._views: OrderedDict[Hashable, bytes] = OrderedDict()
        self._lock = Lock()

    def json(self, key: Hashable, view: Callable[[RunSource], Any]) -> bytes:
        """Return the view as JSON, see :meth:`Roots.json`; views are built one at a time."""
        with self._lock:
            body = self._views.get(key)
            if body is None:
                body = self._views[key] = to_json(view(self.source))
            self._views.move_to_end(key)
            while len(self._views) > CACHED_VIEWS:
                self._views.popitem(last=False)
            return body


class Roots:
    """Registry of the runs below the given paths, each a run or a folder of runs. Symbolic links are not followed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raise RunNotFoundError for a path that does not exist."""
        for path in paths:
            if not path.is_dir():
                what = "is a file" if path.exists() else "does not exist"
                raise RunNotFoundError(f"{path} {what}; give the directory of a run, or one that contains runs")
        self._paths = [path.resolve() for path in paths]
        self._known: dict[str, Path] = {}
        self._open: OrderedDict[str, _OpenRun] = OrderedDict()
        self._lock = Lock()

    def paths(self) -> dict[str, Path]:
        """Scan the paths; return id -> run, newest first within a folder. :meth:`path` accepts these ids afterwards."""
        paths: dict[str, Path] = {}
        for root in self._paths:
            folders = [root] if _is_run(root) else sorted(root.iterdir(), key=_modified, reverse=True)
            for folder in folders:
                if folder.is_dir() and not (folder.is_symlink() and folder != root) and _is_run(folder):
                    paths[_id(folder)] = _display_path(folder)
        self._known = paths
        return paths

    @property
    def num_runs(self) -> int:
        """Number of runs found by the latest scan."""
        return len(self._known)

    def path(self, run_id: str) -> Path:
        """Return the path of a run.

        Raises RunNotFoundError for an unknown id, and for a run that contains symbolic links.
        """
        path = self._known.get(run_id)
        if path is None or not _is_run(path) or path.is_symlink():
            path = self.paths().get(run_id)
        if path is None:
            raise RunNotFoundError("no such run; it may have been removed, or is not below the given paths")
        if link := next((each for each in (*path.glob("*"), *path.glob("rank-*/*")) if each.is_symlink()), None):
            raise RunNotFoundError(f"{link.name} in {path.name} is a symbolic link, which the web page does not follow")
        return path

    def summaries(self, offset: int = 0, limit: int | None = None) -> tuple[RunSummary, ...]:
        """Return a page of the list of runs, read from manifests only; :attr:`num_runs` is the total."""
        shown = list(self.paths().items())[offset : None if limit is None else offset + limit]
        return tuple(_summary(run_id, path) for run_id, path in shown)

    def source(self, run_id: str) -> RunSource:
        """Return the open run, read again only if it changed. Raises the errors of open_run."""
        return self._opened(run_id).source

    def json(self, run_id: str, key: Hashable, view: Callable[[RunSource], Any]) -> bytes:
        """Return a view of a run as JSON, built once for all viewers until the run changes.

        ``key`` identifies the view within the run.
        """
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
        """Return a record and its run; ``key`` is as in :func:`~tapscope.dashboard.model.run.record_key`.

        Raises DataError if there is no matching record.
        """
        source = self.source(run_id)
        records = source.of_site(site, step, rank)
        record = next((r for r in records if not key or record_key(r) == key), None)
        if record is None:
            raise DataError(f"no record of {site} in step {step} on rank {rank}")
        return source, record

    def places_of(self, link: Permalink) -> tuple[LinkedPlace, ...]:
        """Return the targets of a permalink: one per run of its name with the record. Raises DataError if there is
        none."""
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
        """Return all values of a record. Raises DataError if its payload was not recorded."""
        source, record = self.record(run_id, site, step, rank, key)
        if record.entry is None:
            raise DataError(f"no values of {site} were kept in step {step}")
        return source.table(record)


def _display_path(path: Path) -> Path:
    """Return the path relative to the working directory if possible, so that commands on the page can be pasted."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) and path != Path.cwd() else path


def stamp_of(path: Path) -> tuple[int, int]:
    """Return a stamp that changes when a run grows or is replaced.

    It is the total size and the latest modification time of the manifest and the records files.
    """
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
