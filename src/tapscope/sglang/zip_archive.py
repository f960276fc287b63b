"""Archive: locates the members of an uncompressed ZIP archive without extracting them.

Only the central directory at the end is read. ``zipfile`` takes several times as long for a small file, and rejects
members without a computed CRC-32.
"""

import mmap
import os
import struct
import zlib
from typing import NamedTuple

_END, _END64, _LOCATOR = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_ENTRY = struct.Struct("<4s4x2H4x3I3H8xI")  # fixed part of a central directory entry
_SMALL = 1 << 16
"""Maximum size in bytes of a file that is read whole, and of the tail searched for the end-of-directory record."""
_TAIL = 1 << 13
"""Number of bytes at each end of a larger file that are read first: torch writes the pickle before the storages."""
_MAX_DIRECTORY = 64 << 20
_BLOCK = 1 << 22
_ABSENT = 0xFFFFFFFF
_ENCRYPTED = 1
_make = tuple.__new__  # like NamedTuple's __new__, in half the time


class ArchiveProblem(ValueError):
    """The bytes are not a valid archive; the message gives the reason."""


class Member(NamedTuple):
    """A member of the archive."""

    header: int
    """Offset of the local header, which precedes the bytes."""
    nbytes: int
    crc: int
    """CRC-32 of the bytes according to the directory; 0 in archives written without checksums."""
    is_stored: bool
    """True if the bytes are stored uncompressed and unencrypted."""
    num_packed: int = 0
    """Compressed size in bytes."""
    is_deflated: bool = False


class FileEnd(NamedTuple):
    """The last bytes of a file."""

    start: int
    """Offset of ``data`` in the file; 0 if ``data`` is the whole file."""
    data: bytes


class Archive:
    """An open ZIP archive: a whole file, or ``nbytes`` from byte ``at`` of it; raises ArchiveProblem."""

    def __init__(self, fd: int, at: int = 0, nbytes: int | None = None) -> None:
        self._fd, self._at = fd, at
        self._size = os.fstat(fd).st_size if nbytes is None else nbytes
        self._start, self._tail = self._last(_SMALL if self._size <= _SMALL else _TAIL)
        if self._start and _END not in self._tail:  # a long archive comment
            self._start, self._tail = self._last(_SMALL)
        self._head = os.pread(fd, _TAIL, at) if self._start else b""
        self.members = self._directory()
        """Name -> member."""
        self.has_checksums = any(member.crc for member in self.members.values() if member.nbytes)
        """False for archives written with ``torch.serialization.set_crc32_options(False)``."""

    def _last(self, count: int) -> tuple[int, bytes]:
        start = max(self._size - count, 0)
        return start, os.pread(self._fd, self._size - start, self._at + start)

    @property
    def end(self) -> FileEnd:
        """The last bytes of the file; the whole file if it is small."""
        return FileEnd(self._start, self._tail)

    def place(self, name: str) -> int:
        """Return the offset of a stored member's bytes in the file."""
        if not self.members[name].is_stored:
            raise ArchiveProblem("is a compressed archive, which torch.save does not write")
        return self._at + self.begin(name)

    def begin(self, name: str) -> int:
        """Return the offset of a member's bytes in the archive, compressed or not."""
        member = self.members[name]
        head = self._read(member.header, 30)  # local header: has its own name and extra field lengths
        if len(head) < 30 or head[:4] != b"PK\x03\x04":
            raise ArchiveProblem(f"is damaged where its member {name[:60]!r} should begin")
        begin = member.header + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:], "little")
        if begin + (member.nbytes if member.is_stored else member.num_packed) > self._size:
            raise ArchiveProblem(f"is cut off within its member {name[:60]!r}")
        return begin

    def read(self, name: str, limit: int) -> bytes:
        """Return the bytes of a stored member after verifying its checksum; raises ArchiveProblem above ``limit``
        bytes."""
        member, begin = self.members[name], self.place(name) - self._at
        if member.nbytes > limit:
            raise ArchiveProblem(f"its {name[:60]!r} has {member.nbytes:,} bytes, at most {limit:,} are read")
        data = self._read(begin, member.nbytes)
        if self.has_checksums and zlib.crc32(data) != member.crc:
            raise ArchiveProblem(f"is damaged: {name[:60]!r} has not the CRC-32 that was written for it")
        return data

    def damaged(self) -> list[tuple[int, int, str]] | None:
        """Return (first byte, end, name) of members whose CRC-32 does not match; None if no checksums were written."""
        if not self.has_checksums:
            return None
        spans = []
        with mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
            for name, member in self.members.items():
                begin, crc = self.place(name), 0
                end = begin + member.nbytes
                for at in range(begin, end, _BLOCK):
                    crc = zlib.crc32(data[at : min(at + _BLOCK, end)], crc)
                if crc != member.crc:
                    spans.append((begin, end, name))
        return spans

    def _read(self, at: int, count: int) -> bytes:
        if at >= self._start:
            return self._tail[at - self._start : at - self._start + count]
        if at + count <= len(self._head):
            return self._head[at : at + count]
        return os.pread(self._fd, count, self._at + at)

    def _directory(self) -> dict[str, Member]:
        end = self._tail.rfind(_END)
        if end < 0 or end + 22 > len(self._tail):
            raise ArchiveProblem("has no directory")
        nbytes, begin = struct.unpack_from("<2I", self._tail, end + 12)
        locator = end - 20
        if locator >= 0 and self._tail[locator : locator + 4] == _LOCATOR:
            end64 = self._read(struct.unpack_from("<Q", self._tail, locator + 8)[0], 56)
            if end64[:4] != _END64 or len(end64) < 56:
                raise ArchiveProblem("is damaged where its directory should end")
            nbytes, begin = struct.unpack_from("<2Q", end64, 40)
        if begin + nbytes > self._start + end or nbytes > _MAX_DIRECTORY:
            raise ArchiveProblem("is damaged where its directory should be")
        return dict(_entries(self._read(begin, nbytes)))


def _entries(data: bytes) -> list[tuple[str, Member]]:
    members = []
    at = 0
    while at < len(data):
        if at + _ENTRY.size > len(data):
            raise ArchiveProblem("has a damaged directory")
        magic, flags, method, crc, packed, nbytes, name_size, extra_size, comment_size, header = _ENTRY.unpack_from(
            data, at
        )
        at += _ENTRY.size
        if magic != b"PK\x01\x02" or at + name_size + extra_size > len(data):
            raise ArchiveProblem("has a damaged directory")
        name = data[at : at + name_size].decode("utf-8", "replace")
        extra = data[at + name_size : at + name_size + extra_size]
        if _ABSENT in (packed, nbytes, header):
            nbytes, packed, header = _zip64_values(extra, nbytes, packed, header)
        at += name_size + extra_size + comment_size
        is_stored = method == 0 and packed == nbytes and not flags & _ENCRYPTED
        is_deflated = method == 8 and not flags & _ENCRYPTED
        members.append((name, _make(Member, (header, nbytes, crc, is_stored, packed, is_deflated))))
    return members


def _zip64_values(extra: bytes, *numbers: int) -> list[int]:
    """Replace numbers that exceed 32 bits by their values in the ZIP64 extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            left = iter(struct.unpack_from(f"<{min(size, len(extra) - at - 4) // 8}Q", extra, at + 4))
            return [next(left, _ABSENT) if number == _ABSENT else number for number in numbers]
        at += 4 + size
    return list(numbers)
