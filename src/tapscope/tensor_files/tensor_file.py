"""Reader for one file of tensors (.pt, .npz, .npy or .safetensors); payloads are read on access.

No code is executed: pickles are interpreted by :mod:`tapscope.sglang.safe_unpickler`, and .npy files with Python
objects are rejected.
"""

import io
import json
import os
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tapscope.core import dtypes
from tapscope.core.errors import RunCorruptError
from tapscope.core.regular_files import reading
from tapscope.run_format.tensor_layout import Tensor, packed
from tapscope.sglang import torch_save_reader
from tapscope.sglang.pickle_template import PickleTemplates
from tapscope.sglang.zip_archive import Archive, ArchiveProblem, FileEnd, Member

_MAX_HEADER = 100 << 20
"""Maximum header size of a .safetensors file in bytes, the same limit as in the safetensors library."""
_NPY_HEADER = 1 << 14
"""Maximum header size of an .npy file in bytes."""
_MAX_INFLATED = 1 << 30
"""Maximum size in bytes of a compressed array, which must be decompressed into memory as a whole."""
_NUMPY_NAMES = {
    np.dtype(name).str: name
    for name in (
        *("float64", "float32", "float16", "int64", "int32", "int16", "int8"),
        *("uint64", "uint32", "uint16", "uint8", "bool", "complex64", "complex128"),
    )
}


@dataclass(frozen=True, slots=True)
class Deflated:
    """A compressed array in an .npz file."""

    offset: int
    """Offset of the first compressed byte in the file."""
    num_packed: int
    tensor: Tensor
    """Layout in the uncompressed bytes; the offset is relative to their start."""


class _Problem(ValueError):
    """The file does not have the format implied by its suffix; the message is a predicate without subject."""


def read_tensor_file(path: Path, templates: PickleTemplates | None = None) -> tuple[Any, FileEnd | None]:
    """Return (contents, the last bytes of the file if they were read).

    Contents are a :class:`Tensor`, a :class:`Deflated`, or containers of these and of plain values. Raises
    RunCorruptError with the file and the reason.
    """
    if path.suffix in (".pt", ".pth", ".bin"):
        return torch_save_reader.load_with_end(path, templates)
    try:
        with reading(path) as file:
            if path.suffix == ".npy":
                return _npy(file.read(_NPY_HEADER), 0, os.fstat(file.fileno()).st_size), None
            if path.suffix == ".npz":
                archive = Archive(file.fileno())
                return _npz(archive, file.fileno()), archive.end
            return read_safetensors(file.fileno()), None
    except (ArchiveProblem, _Problem) as error:
        raise RunCorruptError(f"{path}: {error}") from None
    except OSError as error:
        raise RunCorruptError(f"{path}: cannot be read: {error.strerror or error}") from None


def _npy(head: bytes, offset: int, size: int) -> Tensor:
    """Parse the header of an .npy file of ``size`` bytes that begins at ``offset`` of another file."""
    stream = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(stream)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if read is None:
            raise _Problem(f"is an .npy file of version {version[0]}.{version[1]}, which is not read")
        shape, is_fortran, dtype = read(stream)
    except _Problem:
        raise
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, EOFError) as error:
        raise _Problem(f"is not an .npy file: {str(error)[:120]}") from None
    if dtype.hasobject:
        raise _Problem("holds Python objects (a pickle); nothing was executed")
    name = _NUMPY_NAMES.get(dtype.str)
    if name is None:
        hint = "; save bfloat16 with safetensors or torch.save" if dtype.kind == "V" else ""
        if dtype.byteorder == ">":
            hint = "; save it little-endian: array.astype(array.dtype.newbyteorder('<'))"
        raise _Problem(f"has dtype {str(dtype)[:40]}, which is not read{hint}")
    if len(shape) > 64 or not all(isinstance(n, int) and 0 <= n < 1 << 48 for n in shape):
        raise _Problem(f"has the invalid shape {str(shape)[:60]}")
    begin = stream.tell()
    if begin + prod(shape) * dtype.itemsize > size:
        raise _Problem(f"is cut off: its shape {shape} needs {prod(shape) * dtype.itemsize:,} bytes")
    if is_fortran:
        strides = tuple(prod(shape[:i]) for i in range(len(shape)))
        return Tensor(name, shape, strides, offset + begin)
    return packed(name, shape, offset + begin)


def _npz(archive: Archive, fd: int) -> dict[str, Tensor | Deflated]:
    tensors: dict[str, Tensor | Deflated] = {}
    for name, member in archive.members.items():
        if not name.endswith(".npy"):
            continue
        begin = archive.begin(name)
        try:
            if member.is_stored:
                head = os.pread(fd, min(_NPY_HEADER, member.nbytes), begin)
                tensor: Tensor | Deflated = _npy(head, begin, member.nbytes)
            elif member.is_deflated:
                tensor = _deflated(fd, begin, member)
            else:
                raise _Problem("is compressed by a method that is not read; use numpy.savez or savez_compressed")
        except _Problem as error:
            raise _Problem(f"its array {name.removesuffix('.npy')[:80]!r} {error}") from None
        tensors[name.removesuffix(".npy")] = tensor
    if not tensors:
        raise _Problem("is a zip archive without an array: numpy.savez did not write it")
    return tensors


def _deflated(fd: int, begin: int, member: Member) -> Deflated:
    if member.nbytes > _MAX_INFLATED:
        raise _Problem(f"is compressed and has {member.nbytes:,} bytes; save arrays this large with numpy.savez")
    try:
        head = zlib.decompressobj(-15).decompress(os.pread(fd, min(member.num_packed, 1 << 16), begin), _NPY_HEADER)
    except zlib.error as error:
        raise _Problem(f"is damaged: {error}") from None
    return Deflated(begin, member.num_packed, _npy(head, 0, member.nbytes))


def inflate(path: Path, one: Deflated) -> bytes:
    """Return the uncompressed bytes of an array, including its .npy header; raises RunCorruptError."""
    try:
        with reading(path) as file:
            data = os.pread(file.fileno(), one.num_packed, one.offset)
        inflated = zlib.decompressobj(-15).decompress(data, one.tensor.end)
    except (OSError, zlib.error) as error:
        raise RunCorruptError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(inflated) < one.tensor.end:
        raise RunCorruptError(f"{path}: a compressed array is cut off")
    return inflated


def read_safetensors(fd: int) -> dict[str, Tensor]:
    """Return name -> tensor in file order; raises _Problem."""
    size = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER):
        raise _Problem("is not a .safetensors file, or is cut off within its header")
    try:
        header = json.loads(os.pread(fd, length, 8))
    except (ValueError, RecursionError):
        raise _Problem("is not a .safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise _Problem("is not a .safetensors file: its header is not a JSON object")
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        try:
            dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            is_valid = all(type(n) is int and 0 <= n < 1 << 48 for n in (*shape, start, end)) and len(shape) <= 64
        except (TypeError, KeyError, ValueError):
            is_valid = False
        if not is_valid:
            raise _Problem(f"has an invalid entry for {name[:80]!r}")
        if not isinstance(dtype, str) or dtype not in dtypes.OF_SAFETENSORS:
            raise _Problem(f"has dtype {str(dtype)[:40]} in {name[:80]!r}, which is not read")
        tensor = packed(dtypes.OF_SAFETENSORS[dtype], shape, 8 + length + start)
        if tensor.nbytes != end - start or 8 + length + end > size:
            raise _Problem(f"is cut off or damaged: {name[:80]!r} does not fit in it")
        tensors[name] = tensor
    return dict(sorted(tensors.items(), key=lambda item: item[1].offset))
