"""Segment: a file of many payloads that becomes a valid safetensors file when sealed.

A segment begins with an 8-byte header length and a reserved, blank header. Payloads are appended at 64-byte
boundaries; ``__pad`` tensors cover the gaps, because safetensors does not allow holes. Sealing writes the header into
the reserved space. Until then, only the record lines describe the content.
"""

import errno
import os
from collections.abc import Container, Sequence
from functools import lru_cache
from itertools import count
from json.encoder import encode_basestring_ascii
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tapscope.core import dtypes
from tapscope.core.errors import RecorderError
from tapscope.core.regular_files import reading
from tapscope.run_format.io_syscalls import Disk

ALIGNMENT = 64
HEADER_BYTES = 128 * 1024
"""Default number of bytes reserved for the header; a segment is full once its header is."""
MAX_HEADER_BYTES = 4 * 1024 * 1024
"""Upper limit for the header reservation, which doubles from segment to segment while payloads are small."""
SEGMENT_BYTES = 256 * 1024 * 1024
"""Maximum size of a segment in bytes; a larger tensor gets its own segment."""

SEGMENTS = "seg-*.safetensors"
"""Glob that matches the file names of segments."""
_SLACK = 256
"""Number of header bytes kept free for entries that a repair may add."""
MAX_NAME = 1000
"""Maximum length of a tensor name; longer names are truncated, because the record line has the full name."""

_PADS = [b"\0" * n for n in range(ALIGNMENT)]


class Mark(NamedTuple):
    """Snapshot of the state of a segment, for a rollback."""

    num_names: int
    num_pieces: int
    header_size: int
    end: int


class SegmentWriter:
    """Appends payloads to a new file: :meth:`place` assigns offsets, :meth:`flush` writes the placed payloads.

    I/O failures raise an OSError that names the file.
    """

    def __init__(
        self, path: Path, *, limit: int = SEGMENT_BYTES, header_bytes: int = HEADER_BYTES, disk: Disk | None = None
    ) -> None:
        self.path = path
        self.name = path.name
        self.header_bytes = header_bytes
        """Size of the reserved header including its length prefix, i.e. the offset of the first payload."""
        self._disk = disk or Disk()
        self._limit = limit
        self._pieces: list[str] = []
        self._header_size = 2
        self._names: dict[str, None] = {}
        self._end = 0
        self._flushed = 0
        self._queue: list[Any] = []
        self._fd = self._disk.create(path, os.O_RDWR | os.O_EXCL)
        try:
            self._write([blank_header(header_bytes)], 0)
        except OSError:
            self.discard()
            raise

    def place(self, name: str, dtype: str, shape: Sequence[int], payload: Any) -> int | None:
        """Assign an offset to a payload and queue it for :meth:`flush`.

        ``payload`` is a contiguous bytes-like object that must not change until then. Returns the offset from the start
        of the file, or None if the segment is full; the first payload always fits. Raises RecorderError if the number
        of bytes does not match ``dtype`` and ``shape``.
        """
        nbytes = memoryview(payload).nbytes
        form, needed = _form(dtype, tuple(shape))
        if needed != nbytes:
            raise RecorderError(f"{name} came with {nbytes} bytes; {dtype} of shape {list(shape)} has {needed}")
        pad = -self._end % ALIGNMENT
        begin = self._end + pad
        if name in self._names or len(name) > MAX_NAME or _is_reserved(name):
            name = unused_name(name, self._names)
        piece = _member(name, form, begin, begin + nbytes)
        if pad:
            piece = f"{describe(f'__pad{begin}', 'U8', [pad], self._end, begin)},{piece}"
        size = self._header_size + len(piece) + 1
        if self._pieces and (begin + nbytes > self._limit or size > self.header_bytes - 8 - _SLACK):
            return None
        self._names[name] = None
        self._pieces.append(piece)
        self._header_size = size
        if pad:
            self._queue.append(_PADS[pad])
        if nbytes:
            self._queue.append(payload)
        self._end = begin + nbytes
        return self.header_bytes + begin

    def place_packed(self, names: Sequence[str], dtype: str, shape: Sequence[int], payload: Any) -> int | None:
        """Place many payloads of equal dtype and shape, stored back to back in the buffer ``payload``.

        Returns the offset of the first payload. Returns None, with nothing queued, if the payloads must be placed one
        by one with :meth:`place`: not all fit, they need padding, or a name is reserved, too long or taken.
        """
        form, nbytes = _form(dtype, tuple(shape))
        if memoryview(payload).nbytes != nbytes * len(names):
            raise RecorderError(f"{len(names)} payloads of {nbytes} bytes came as {memoryview(payload).nbytes}")
        pad = -self._end % ALIGNMENT
        begin = self._end + pad
        end = begin + nbytes * len(names)
        if not names or not nbytes or nbytes % ALIGNMENT or end > self._limit:
            return None
        fresh = dict.fromkeys(names)
        is_usable = len(fresh) == len(names) and self._names.keys().isdisjoint(fresh)
        if not is_usable or max(map(len, names)) > MAX_NAME or any(map(_is_reserved, names)):
            return None
        middle = f':{{{form},"data_offsets":['
        places = zip(map(encode_basestring_ascii, names), range(begin, end, nbytes), strict=True)
        piece = ",".join([f"{name}{middle}{place},{place + nbytes}]}}" for name, place in places])
        if pad:
            piece = f"{describe(f'__pad{begin}', 'U8', [pad], self._end, begin)},{piece}"
        size = self._header_size + len(piece) + 1
        if size > self.header_bytes - 8 - _SLACK:
            return None
        self._names |= fresh
        self._pieces.append(piece)
        self._header_size = size
        self._queue += [_PADS[pad], payload] if pad else [payload]
        self._end = end
        return self.header_bytes + begin

    @property
    def num_waiting(self) -> int:
        """Number of placed buffers that are not yet written."""
        return len(self._queue)

    @property
    def full_of_names(self) -> bool:
        """Whether the header is filling up much faster than the file, as with many small payloads."""
        return self._header_size > self.header_bytes // 2 and self._end < self._limit // 2

    def flush(self) -> None:
        """Write the placed payloads."""
        if self._queue:
            parts, self._queue = self._queue, []
            self._write(parts, self.header_bytes + self._flushed)
            self._flushed = self._end

    def sync(self) -> None:
        """Sync all flushed data to disk."""
        self._disk.sync(self._fd, self.path)

    def check_present(self) -> None:
        """Raise FileNotFoundError if the file was removed, because the data would be lost."""
        check_present(self._fd, self.path)

    def mark(self) -> Mark:
        """Return a snapshot for :meth:`roll_back`; all placed payloads must be flushed."""
        return Mark(len(self._names), len(self._pieces), self._header_size, self._end)

    def roll_back(self, mark: Mark) -> None:
        """Discard everything placed or written since ``mark``, and truncate the file."""
        self._queue.clear()
        while len(self._names) > mark.num_names:
            self._names.popitem()
        del self._pieces[mark.num_pieces :]
        self._header_size = mark.header_size
        self._end = self._flushed = mark.end
        self._disk.truncate(self._fd, self.path, self.header_bytes + mark.end)

    def seal(self, *, sync: bool = False) -> None:
        """Flush, write the header and close the file, which is then valid safetensors; remove an empty segment.

        Raises OSError and leaves the file unsealed if its length does not match the header.
        """
        if not self._pieces:
            self.discard()
            return
        try:
            self.flush()
            self._fit()
            header = ("{" + ",".join(self._pieces) + "}").encode()
            self._write([header], 8)
            if sync:
                self.sync()
        finally:
            self._close()

    def discard(self) -> None:
        """Close and remove the file."""
        self._close()
        self._disk.remove(self.path)

    def _fit(self) -> None:
        """Truncate leftovers of a failed write; raise OSError if bytes are missing."""
        size, expected = os.fstat(self._fd).st_size, self.header_bytes + self._end
        if size > expected:
            self._disk.truncate(self._fd, self.path, expected)
        elif size < expected:
            raise OSError(errno.EIO, f"it has {size} bytes, {expected} were written", str(self.path))

    def _close(self) -> None:
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1

    def _write(self, parts: list[Any], offset: int) -> None:
        self._disk.write(self._fd, self.path, parts, offset)


def blank_header(header_bytes: int) -> bytes:
    """Return the first ``header_bytes`` bytes of a segment: the length of the header, and spaces in its place."""
    return (header_bytes - 8).to_bytes(8, "little") + b" " * (header_bytes - 8)


def describe(name: str, kind: str, shape: Sequence[int], begin: int, end: int) -> str:
    """Return the entry of a tensor in a safetensors header, as ASCII JSON.

    ``kind`` is a safetensors dtype; ``begin`` and ``end`` are offsets from the end of the header.
    """
    return _member(name, _describe_form(kind, shape), begin, end)


def _member(name: str, form: str, begin: int, end: int) -> str:
    return f'{encode_basestring_ascii(name)}:{{{form},"data_offsets":[{begin},{end}]}}'


def _describe_form(kind: str, shape: Sequence[int]) -> str:
    return f'"dtype":"{kind}","shape":[{",".join(map(str, shape))}]'


@lru_cache(maxsize=4096)
def _form(dtype: str, shape: tuple[int, ...]) -> tuple[str, int]:
    """Return the dtype and shape fields of a header entry, and the size of the tensor in bytes."""
    return _describe_form(*dtypes.safetensors_form(dtype, shape)), dtypes.itemsize(dtype) * prod(shape)


def _is_reserved(name: str) -> bool:
    return name.startswith("__")


def unused_name(name: str, taken: Container[str]) -> str:
    """Return ``name``, changed if necessary so that it is not too long, reserved by safetensors, or ``taken``."""
    if name not in taken and len(name) <= MAX_NAME and not _is_reserved(name):
        return name
    name = name.lstrip("_")[:MAX_NAME]
    return next(new for n in count(2) if (new := f"{name}~{n}") not in taken)


class _Tensor(msgspec.Struct, gc=False):
    data_offsets: tuple[int, int] = (0, 0)


_decode = msgspec.json.Decoder(dict[str, _Tensor]).decode


def read_head(path: Path) -> tuple[int, int, dict[str, tuple[int, int]] | None]:
    """Return (file size, header size as stated in the file, header as parsed by :func:`read_header`).

    The header is None if its size is impossible. Raises OSError if the file cannot be read or is not a regular file.
    """
    with reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        reserved = int.from_bytes(file.read(8), "little")
        may_be = 0 < reserved <= min(size - 8, MAX_HEADER_BYTES)
        return size, reserved, read_header(file.read(reserved)) if may_be else None


def read_header(head: bytes) -> dict[str, tuple[int, int]] | None:
    """Parse a safetensors header (without its length prefix) into tensor name -> (begin, end).

    A tensor with invalid offsets gets (0, 0). Returns None if ``head`` is not a JSON object, as before sealing.
    """
    try:
        try:
            return {name: tensor.data_offsets for name, tensor in _decode(head).items()}
        except msgspec.ValidationError:  # not written by SegmentWriter, or damaged after the first invalid entry
            header = msgspec.json.decode(head)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return {name: _span(tensor) for name, tensor in header.items()} if isinstance(header, dict) else None


def _span(tensor: Any) -> tuple[int, int]:
    span = tensor.get("data_offsets") if isinstance(tensor, dict) else None
    if isinstance(span, list) and len(span) == 2 and all(type(place) is int for place in span):
        return span[0], span[1]
    return 0, 0


def check_present(fd: int, path: Path) -> None:
    """Raise FileNotFoundError if the open file was unlinked."""
    if not os.fstat(fd).st_nlink:
        raise FileNotFoundError(2, "it was removed while it was being written", str(path))
