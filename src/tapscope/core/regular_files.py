"""Safe opening of regular files by name: never a pipe, a device or a socket.

Opening a named pipe blocks until a writer opens it, and reading ``/dev/zero`` never ends. A path that is not a regular
file, or that cannot be opened, raises OSError with the path and the reason. No call blocks, and a file larger than its
limit is not read.
"""

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
}
_ABANDONED_AFTER_S = 3600
"""Age in seconds after which an unmodified temporary file counts as abandoned by its writer."""


def open_regular(path: Path | str, flags: int = os.O_RDONLY) -> int:
    """Return a file descriptor of a regular file; raises OSError that names the path for anything else.

    ``flags`` for writing should include O_NOFOLLOW: only the file name identifies the file as ours, and following a
    symbolic link would modify another file. A file created through ``flags`` has mode 0600.
    """
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if flags & os.O_NOFOLLOW and error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link, which is not written through", str(path)) from None
        if error.errno == errno.ENXIO:  # a socket, or a pipe that is opened for writing and has no reader
            raise OSError(errno.EINVAL, "it is not a regular file", str(path)) from None
        raise
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    kind = _KINDS.get(stat.S_IFMT(mode), "a special file")
    raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


@contextmanager
def reading(path: Path | str) -> Iterator[BinaryIO]:
    """Context manager: open a regular file for reading; raises like :func:`open_regular`."""
    with os.fdopen(open_regular(path), "rb") as file:
        yield file


def read_small(path: Path, limit: int) -> bytes:
    """Read a regular file of at most ``limit`` bytes; raises OSError for a longer file, without reading it."""
    with reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, at most {limit:,} are read", str(path))
        return file.read(limit)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Context manager: write a new file that atomically replaces ``path`` on success and is removed on an exception.

    The temporary name is unique per writer; temporary files left by killed writers of the same path are removed. Raises
    OSError.
    """
    _remove_leftovers(path)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def _remove_leftovers(path: Path) -> None:
    is_part = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.part").fullmatch
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if is_part(entry.name) and time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED_AFTER_S:
                os.unlink(entry)
