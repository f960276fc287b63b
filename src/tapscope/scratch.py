"""Scratch: directories for sockets and the like, which do not outlive a killed owner for long.

Whoever makes one holds a lock in it until its process ends, however that ends; making the next one removes those whose
lock is free. A directory without a lock is nobody's to remove.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "tapscope-"
_LOCK = "lock"
_held: dict[Path, int] = {}


def make_scratch(parent: Path | None = None) -> Path:
    """A new directory of mode 0700 in ``parent``, or where temporary files go; first removes what was left there."""
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    _remove_left(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    unnamed = folder / f"{_LOCK}-new"  # under its name it is locked from the start
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unnamed.rename(folder / _LOCK)
    _held[folder] = descriptor
    return folder


def remove_scratch(folder: Path) -> None:
    """Remove a directory that :func:`make_scratch` made here; safe to call twice."""
    shutil.rmtree(folder, ignore_errors=True)
    descriptor = _held.pop(folder, None)
    if descriptor is not None:
        os.close(descriptor)


def _remove_left(parent: Path) -> None:
    """Remove the directories of this user whose owners have ended."""
    with suppress(OSError):
        for folder in parent.glob(f"{_PREFIX}*"):
            if folder not in _held and _is_left(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_left(folder: Path) -> bool:
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return False
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
