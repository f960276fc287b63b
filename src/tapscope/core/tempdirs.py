"""Temporary directories, e.g. for sockets, that are cleaned up even after their owner was killed.

The owner holds a lock on a file in the directory until its process ends. Creating a directory first removes directories
whose lock is free. Only a directory whose lock file contains tapscope's marker is removed, whatever its name.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "tapscope-"
_LOCK = "lock"
_MARKER = b"tapscope scratch directory\n"
_held: dict[Path, int] = {}


def make_tempdir(parent: Path | None = None) -> Path:
    """Create a directory of mode 0700 in ``parent`` or the system's temporary directory, after removing abandoned
    ones."""
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    _remove_stale(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    unnamed = folder / f"{_LOCK}-new"  # renamed once locked, so that the final name is never unlocked
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.write(descriptor, _MARKER)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unnamed.rename(folder / _LOCK)
    _held[folder] = descriptor
    return folder


def remove_tempdir(folder: Path) -> None:
    """Remove a directory that this process created with :func:`make_tempdir`; safe to call twice."""
    shutil.rmtree(folder, ignore_errors=True)
    descriptor = _held.pop(folder, None)
    if descriptor is not None:
        os.close(descriptor)


def remove_stale_tempdir(folder: Path) -> bool:
    """Remove ``folder`` if this user's :func:`make_tempdir` created it and its owner has ended; return True if
    removed."""
    if folder in _held or not _is_abandoned(folder):
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True


def _remove_stale(parent: Path) -> None:
    with suppress(OSError):
        for folder in parent.glob(f"{_PREFIX}*"):
            remove_stale_tempdir(folder)


def _is_abandoned(folder: Path) -> bool:
    if not folder.name.startswith(_PREFIX):
        return False
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return False
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.pread(descriptor, len(_MARKER) + 1, 0) == _MARKER
    except OSError:
        return False
    finally:
        os.close(descriptor)
