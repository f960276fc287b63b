"""Regular: files opened to be read, of which only the name is known: never a pipe, a device or a socket.

Opening a named pipe waits for a writer, and ``/dev/zero`` never ends. Whatever is not a regular file, or cannot be
opened, is an OSError that names the path and the reason; nothing waits, and what is larger than its limit is not read.
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
_LEFT_OVER_S = 3600
"""A temporary file that has not changed for so long has lost its writer."""


def open_regular(path: Path | str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file; raises OSError, naming the path, for anything else.

    ``flags`` should have O_NOFOLLOW for a file that is written: it is ours by its name alone, and a link would have
    another file changed. A file that they create is its user's alone.
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
    """A regular file, open for reading; raises as :func:`open_regular`."""
    with os.fdopen(open_regular(path), "rb") as file:
        yield file


def read_small(path: Path, limit: int) -> bytes:
    """All of a regular file of at most ``limit`` bytes; raises OSError for a longer one, which is not read."""
    with reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, at most {limit:,} are read", str(path))
        return file.read(limit)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file, open for writing, that replaces ``path`` atomically at the end, or is removed after an exception.

    Its name cannot collide with that of another writer; what killed writers of the same path left is removed. Raises
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
            if is_part(entry.name) and time.time() - entry.stat(follow_symlinks=False).st_mtime > _LEFT_OVER_S:
                os.unlink(entry)
