"""Reader of benchmark results in files, folders and ZIP archives, as CI jobs store them."""

import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from tapscope.core.errors import DataError
from tapscope.core.formatting import plural
from tapscope.core.regular_files import read_small, reading
from tapscope.dashboard.model.bench_result import BenchFiles, BenchResult, StoredResult, bench_results, commit_in
from tapscope.run_format.manifest import MANIFEST

MAX_FILE_BYTES = 64 << 20
"""Size limit of a JSON file; a larger one is reported and skipped. Files with per-request details can be that large."""
MAX_FILES = 20_000
_SUFFIXES = (".json", ".jsonl")
_Stamp = tuple[int, int]


class BenchSource:
    """Benchmark results under the given paths. Symbolic links are not followed, and run directories are skipped."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raise DataError for a path that does not exist."""
        for path in paths:
            if not path.exists():
                raise DataError(f"no such file or directory: {path}")
        self._paths = tuple(paths)
        self._known: dict[Path, tuple[_Stamp, list[StoredResult], list[str], int, int]] = {}

    def read(self) -> BenchFiles:
        """Return all results; only files that are new or changed since the last call are parsed."""
        results: list[StoredResult] = []
        problems: list[str] = []
        num_files = num_other = 0
        known = {}
        for root, path in self._files(problems):
            try:
                status = path.stat()
            except OSError as error:
                problems.append(f"{path.name}: {error.strerror}")
                continue
            stamp = (status.st_size, status.st_mtime_ns)
            entry = self._known.get(path)
            if entry is None or entry[0] != stamp:
                entry = (stamp, *_parsed(root, path, datetime.fromtimestamp(status.st_mtime, UTC)))
            known[path] = entry
            results += entry[1]
            problems += entry[2]
            num_files, num_other = num_files + entry[3], num_other + entry[4]
        self._known = known
        return BenchFiles(tuple(results), tuple(problems), num_files, num_other, datetime.now(UTC))

    def _files(self, problems: list[str]) -> Iterator[tuple[Path, Path]]:
        """Yield (given path, file) for every JSON file and ZIP archive, sorted by name within each folder."""
        num = 0
        for root in self._paths:
            if root.is_file():
                yield root.parent, root
                continue
            errors: list[OSError] = []
            for folder, folders, names in os.walk(root, onerror=errors.append):
                folders[:] = sorted(name for name in folders if not (Path(folder, name) / MANIFEST).is_file())
                for name in sorted(names):
                    path = Path(folder, name)
                    if path.suffix.lower() not in (*_SUFFIXES, ".zip") or path.is_symlink():
                        continue
                    if (num := num + 1) > MAX_FILES:
                        problems.append(f"{root}: only the first {MAX_FILES:,} files are read")
                        return
                    yield root, path
            problems += [f"{error.filename}: {error.strerror}" for error in errors]


def _parsed(root: Path, path: Path, modified: datetime) -> tuple[list[StoredResult], list[str], int, int]:
    """Parse one file; return its results, problems, number of JSON files, and number of JSON files without a result."""
    results: list[StoredResult] = []
    problems: list[str] = []
    num_files = num_other = 0
    name = path.relative_to(root).as_posix()
    try:
        for inner, raw in _contents(path):
            num_files += 1
            file = f"{name}/{inner}" if inner else name
            items, problem = _json_values(raw, is_lines=file.lower().endswith(".jsonl"))
            problems += [f"{file}: {problem}"] if problem else []
            stored = [result for item in items for result in bench_results(item)]
            num_other += not stored and not problem
            results += [_complete(file, result, root.name, modified) for result in stored]
    except OSError as error:
        problems.append(f"{name}: {error.strerror or error}")
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        problems.append(f"{name}: not a readable ZIP archive: {error}")
    return results, problems, num_files, num_other


def _contents(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (name within the archive, bytes) of each JSON file in ``path``; the name is empty for a plain file.

    Raises OSError and the exceptions of zipfile.
    """
    if path.suffix.lower() != ".zip":
        yield "", read_small(path, MAX_FILE_BYTES)
        return
    with reading(path) as file, zipfile.ZipFile(file) as archive:
        left = MAX_FILE_BYTES
        for member in archive.infolist():
            if member.is_dir() or not member.filename.lower().endswith(_SUFFIXES):
                continue
            with archive.open(member) as opened:
                raw = opened.read(left + 1)  # the size in the ZIP header may be wrong
            if len(raw) > left:
                raise OSError(0, f"its JSON files have more than {MAX_FILE_BYTES:,} bytes")
            left -= len(raw)
            yield member.filename, raw


def _json_values(raw: bytes, *, is_lines: bool) -> tuple[list[Any], str]:
    """Return the JSON values of a file, and an error message for invalid JSON, else empty.

    A file that is not valid as a whole is parsed line by line, because SGLang appends one line per result.
    """
    try:
        text = raw.decode("utf-8-sig")
        if not is_lines:
            return [json.loads(text)], ""
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError) or b"\n{" not in raw:
            return [], f"invalid JSON: {error}"
    items, num_bad = [], 0
    for line in text.splitlines():
        try:
            items += [json.loads(line)] if line.strip() else []
        except (ValueError, RecursionError):
            num_bad += 1
    return items, f"invalid JSON in {plural(num_bad, 'line')}" if num_bad else ""


def _complete(file: str, result: BenchResult, root: str, modified: datetime) -> StoredResult:
    """Return ``result`` with its file, commit and date filled in.

    A missing commit is taken from the file's path, else it is the name of the folder or file. A missing date is the
    file's modification time.
    """
    path = PurePosixPath(file)
    folder = path.parent.name or root
    commit = result.commit or next(filter(None, map(commit_in, reversed(path.parts))), "")
    commit = commit or (folder if path.parent.name else path.stem)
    date = result.date or modified.strftime("%Y-%m-%dT%H:%M:%SZ")
    return StoredResult(file, replace(result, commit=commit, date=date))
