"""Directory: create, check, clear and remove the directory of a run."""

import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tapscope.core.errors import RunCorruptError, RunExistsError
from tapscope.core.regular_files import open_regular, read_small, reading
from tapscope.run_format.manifest import (
    FORMAT,
    INDEX,
    LOCK,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    TABLE,
    rank_dirs,
    write_manifest,
)

RECORDER_FILE = "recorder.json"
"""Holds the address of a live recorder."""
RECORDER_LOG = "recorder.log"
"""The stderr of the recorder."""
_ENDING_S = 30.0
"""Seconds within which a recorder without ranks writes the record indexes and ends."""


def create_run(path: Path, manifest: dict[str, Any]) -> None:
    """Write ``run.json`` (atomically) into a directory that has none.

    ``manifest`` may hold framework, model, dtype, mesh, world_size, command, seeds, config. Raises OSError, and then
    leaves no empty directory behind.
    """
    path.mkdir(parents=True, exist_ok=True)
    try:
        write_manifest(path, manifest)
    except OSError:
        with suppress(OSError):  # it holds something else
            path.rmdir()
        raise


def remove_empty_run(path: Path) -> None:
    """Undo a :func:`create_run` before anything was written into it."""
    (path / MANIFEST).unlink(missing_ok=True)
    path.rmdir()


def clear_run(path: Path, *, force: bool) -> None:
    """Make sure there is no finished run at ``path``.

    Without ``force`` an existing run raises RunExistsError; with it the run is removed, see :func:`remove_run`.
    """
    if check_free(path, force=force):
        _remove_parts(path)


def check_free(path: Path, *, force: bool) -> bool:
    """Whether there is a run that may be replaced; raises like :func:`clear_run` and changes nothing."""
    if path.is_file():
        raise RunExistsError(f"{path} is a file; choose another directory for the run")
    left_over = (RECORDER_FILE, RECORDER_LOG)  # of a recorder that failed before it created the run
    entries = path.iterdir() if path.is_dir() else ()
    taken = any(not entry.name.startswith(".") and entry.name not in left_over for entry in entries)
    if not taken:
        return False
    if not is_run(path):
        raise RunExistsError(f"{path} contains files that are not a tapscope run; choose another directory")
    if not force:
        hint = "choose another path or replace it (--force, in Python force=True)"
        raise RunExistsError(f"{path} already holds a run; {hint}")
    return True


def is_run(path: Path) -> bool:
    """Whether ``path`` is provably the directory of a run: not a link, with a manifest of this format."""
    try:
        if not stat.S_ISDIR(path.lstat().st_mode) or not stat.S_ISREG((path / MANIFEST).lstat().st_mode):
            return False
        manifest = json.loads(read_small(path / MANIFEST, MAX_MANIFEST_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def remove_run(path: Path) -> list[Path]:
    """Remove a run and nothing else; returns the files left because they are not provably part of it.

    Raises RunExistsError when ``path`` is not a run (no manifest of our format, or a symbolic link), or one that is
    being recorded. Links inside are never followed nor removed, and files of other names stay, with the
    directories that hold them.
    """
    if not is_run(path):
        raise RunExistsError(f"{path} is not provably a tapscope run; nothing was removed")
    with locked(path):
        foreign = _remove_parts(path)
    (path / LOCK).unlink(missing_ok=True)
    if not foreign:
        path.rmdir()
    return foreign


@contextmanager
def locked(run: Path, *, create: bool = True) -> Iterator[None]:
    """Hold the locks of the run and its ranks against writers; raises RunExistsError if a process writes, and
    RunCorruptError where one of these is not a regular file.

    A recorder whose ranks have left still writes the record index: its end is waited for. Without ``create`` missing
    locks are not created, and the run may be read-only.
    """
    if create and not (run / LOCK).is_symlink():
        os.close(_open(run / LOCK, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW))
    with ExitStack() as stack:
        for path in (run / LOCK, *(folder / INDEX for folder in rank_dirs(run).values())):
            if path.exists():
                _lock(path, run, stack, _ENDING_S if path.name == LOCK else 0.0)
        yield


def is_abandoned(run: Path) -> bool:
    """Whether a recorder of this host registered here and ended without closing the run: it was killed."""
    try:
        content = json.loads(read_small(run / RECORDER_FILE, MAX_MANIFEST_BYTES))
        if not isinstance(content, dict) or content.get("host") != os.uname().nodename:
            return False
        with reading(run / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a recorder holds it for its lifetime
    except (OSError, ValueError, RecursionError):
        return False
    return True


def may_grow(run: Path) -> bool:
    """Whether a recorder registered here and is not known to have ended."""
    return (run / RECORDER_FILE).is_file() and not is_abandoned(run)


def _lock(path: Path, run: Path, stack: ExitStack, ending_s: float) -> None:
    """Lock a file until the stack ends, within ``ending_s`` if the process that holds it can no longer be joined."""
    fd, deadline = _open(path), time.monotonic() + ending_s
    stack.callback(os.close, fd)
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline or (run / RECORDER_FILE).exists():
                raise RunExistsError(f"{run} is being recorded; wait until its recorder ends") from None
        time.sleep(0.02)


def _open(path: Path, flags: int = os.O_RDONLY) -> int:
    try:
        return open_regular(path, flags)
    except PermissionError:
        raise
    except OSError as error:
        raise RunCorruptError(f"{path} cannot be locked: {error.strerror}") from None


def _remove_parts(run: Path) -> list[Path]:
    """Remove and return what is left; the manifest goes last, so that an interrupted removal can be repeated."""
    foreign = []
    for entry in sorted(run.iterdir()):
        try:
            mode = entry.lstat().st_mode
        except FileNotFoundError:  # a recorder removes its empty log when it ends
            continue
        if stat.S_ISDIR(mode) and _is_rank(entry.name):
            foreign += _remove_rank(entry)
        elif not stat.S_ISREG(mode) or not _is_top(entry.name):
            foreign.append(entry)
        elif entry.name not in (MANIFEST, LOCK):  # the lock may be held by the process that replaces the run
            entry.unlink(missing_ok=True)
    (run / MANIFEST).unlink(missing_ok=True)
    return foreign


def _remove_rank(folder: Path) -> list[Path]:
    foreign = []
    for entry in sorted(folder.iterdir()):
        if stat.S_ISREG(entry.lstat().st_mode) and _is_part(entry.name):
            entry.unlink()
        else:
            foreign.append(entry)
    if not foreign:
        folder.rmdir()
    return foreign


def _is_rank(name: str) -> bool:
    return name.startswith("rank-") and name.removeprefix("rank-").isdecimal()


def _is_top(name: str) -> bool:
    return name in (MANIFEST, LOCK, RECORDER_FILE, RECORDER_LOG, f".{RECORDER_FILE}") or name.startswith(
        f".{MANIFEST}."
    )


def _is_part(name: str) -> bool:
    segment = name.startswith("seg-") and name.endswith(".safetensors")
    lines = name == INDEX or name.startswith(f"{INDEX}.")
    table = name.startswith(Path(TABLE).stem) and name.removesuffix(".new").endswith(Path(TABLE).suffix)
    return segment or lines or table
