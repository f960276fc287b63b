"""Directory: create, check, clear, lock and remove run directories."""

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
"""File with the address of a live recorder."""
RECORDER_LOG = "recorder.log"
"""File that captures the stderr of the recorder."""
_ENDING_S = 30.0
"""Maximum time in seconds for a recorder without ranks to write the record indexes and exit."""


def create_run(path: Path, manifest: dict[str, Any]) -> None:
    """Create the directory ``path`` if needed and write ``run.json`` into it atomically.

    ``manifest`` may contain framework, model, dtype, mesh, world_size, command, seeds and config. Raises OSError; a
    failure leaves no empty directory behind.
    """
    path.mkdir(parents=True, exist_ok=True)
    try:
        write_manifest(path, manifest)
    except OSError:
        with suppress(OSError):  # the directory is not empty
            path.rmdir()
        raise


def remove_empty_run(path: Path) -> None:
    """Undo :func:`create_run` for a run that contains no other files yet."""
    (path / MANIFEST).unlink(missing_ok=True)
    path.rmdir()


def clear_run(path: Path, *, force: bool) -> None:
    """Make ``path`` available for a new run.

    With ``force``, the files of an existing run are removed, but no foreign files, see :func:`remove_run`. Raises
    RunExistsError if there is a run and ``force`` is False, and in any case if ``path`` is a file or a directory with
    files that are not a run.
    """
    if check_free(path, force=force):
        _remove_parts(path)


def check_free(path: Path, *, force: bool) -> bool:
    """Return whether ``path`` has a run that may be replaced; raise like :func:`clear_run`, but change nothing."""
    if path.is_file():
        raise RunExistsError(f"{path} is a file; choose another directory for the run")
    left_over = (RECORDER_FILE, RECORDER_LOG)  # files of a recorder that failed before it created the run
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
    """Return whether ``path`` is certainly a run: a directory, not a symbolic link, with a manifest of this format."""
    try:
        if not stat.S_ISDIR(path.lstat().st_mode) or not stat.S_ISREG((path / MANIFEST).lstat().st_mode):
            return False
        manifest = json.loads(read_small(path / MANIFEST, MAX_MANIFEST_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def remove_run(path: Path) -> list[Path]:
    """Remove the files of a run; return the files that were kept because they are not certainly part of the run.

    Raises RunExistsError if ``path`` is not a run (no manifest of this format, or a symbolic link) or is being
    recorded. Symbolic links inside are neither followed nor removed; files with unknown names and their parent
    directories stay.
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
    """Context manager: hold the locks of the run and of its ranks, which excludes writers.

    A recorder whose ranks have all disconnected still writes record indexes; the function waits up to 30 s for it to
    exit. With ``create=False`` a missing lock file is not created, so the run may be read-only. Raises RunExistsError
    if a process writes the run, and RunCorruptError if a lock is not a regular file.
    """
    if create and not (run / LOCK).is_symlink():
        os.close(_open(run / LOCK, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW))
    with ExitStack() as stack:
        for path in (run / LOCK, *(folder / INDEX for folder in rank_dirs(run).values())):
            if path.exists():
                _lock(path, run, stack, _ENDING_S if path.name == LOCK else 0.0)
        yield


def is_abandoned(run: Path) -> bool:
    """Return whether the recorder of the run was killed: it registered from this machine and holds no lock any more."""
    try:
        content = json.loads(read_small(run / RECORDER_FILE, MAX_MANIFEST_BYTES))
        if not isinstance(content, dict) or content.get("host") != os.uname().nodename:
            return False
        with reading(run / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a recorder holds this lock for its lifetime
    except (OSError, ValueError, RecursionError):
        return False
    return True


def may_grow(run: Path) -> bool:
    """Return whether a recorder may still append to ``run``: one is registered and not known to have been killed."""
    return (run / RECORDER_FILE).is_file() and not is_abandoned(run)


def _lock(path: Path, run: Path, stack: ExitStack, ending_s: float) -> None:
    """Lock a file until ``stack`` closes.

    Waits up to ``ending_s`` seconds for a lock holder that is shutting down, i.e. has removed its registration.
    """
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
    """Remove the files of a run and return the foreign entries that remain.

    The manifest is removed last, so that an interrupted removal can be repeated.
    """
    foreign = []
    for entry in sorted(run.iterdir()):
        try:
            mode = entry.lstat().st_mode
        except FileNotFoundError:  # a recorder removes its empty log when it exits
            continue
        if stat.S_ISDIR(mode) and _is_rank(entry.name):
            foreign += _remove_rank(entry)
        elif not stat.S_ISREG(mode) or not _is_top(entry.name):
            foreign.append(entry)
        elif entry.name not in (MANIFEST, LOCK):  # the process that replaces the run may hold the lock
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
