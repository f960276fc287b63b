"""Writer for files readable by ``torch.load(path, weights_only=True)``: tensors, plain values, dicts and lists.

Torch is not needed. The format is that of torch 1.6 and later (torch/serialization.py): an uncompressed ZIP archive
with ``data.pkl`` in pickle protocol 2, which references storages by persistent ids, and ``data/KEY`` with their bytes.
"""

import struct
import zipfile
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

_STORAGES = {
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
_VERSION = b"3\n"
_TIME = (1980, 1, 1, 0, 0, 0)
_BLOCK = 1 << 24


def save(path: Path, value: Any) -> None:
    """Write ``value`` to ``path``; NumPy arrays, including ml_dtypes, become tensors. Raises TypeError or OSError."""
    pickler = _Pickler()
    pickler.write(value)
    root = path.stem
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        _write(archive, f"{root}/data.pkl", b"\x80\x02" + bytes(pickler.code) + b".")
        _write(archive, f"{root}/byteorder", b"little")
        for key, array in enumerate(pickler.arrays):
            _write(archive, f"{root}/data/{key}", np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        _write(archive, f"{root}/version", _VERSION)


def _write(archive: zipfile.ZipFile, name: str, data: "bytes | memoryview[int]") -> None:
    info = zipfile.ZipInfo(name, _TIME)
    info.file_size = len(data)
    with archive.open(info, "w", force_zip64=len(data) > 1 << 31) as member:
        for start in range(0, len(data), _BLOCK):
            member.write(data[start : start + _BLOCK])


def _integer(value: int) -> bytes:
    """Return the shortest opcode for an integer, the same as Python's pickle."""
    if 0 <= value < 1 << 8:
        return b"K" + bytes([value])
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


class _Pickler:
    """Generates opcodes of pickle protocol 2; a persistent id is ("storage", type, key, "cpu", number of elements)."""

    def __init__(self) -> None:
        self.code = bytearray()
        self.arrays: list[np.ndarray[Any, Any]] = []

    def write(self, value: Any) -> None:
        """Append the opcodes that push ``value``."""
        code = self.code
        if value is None or isinstance(value, bool):
            code += {None: b"N", True: b"\x88", False: b"\x89"}[value]
        elif isinstance(value, int):
            code += _integer(value)
        elif isinstance(value, float):
            code += b"G" + struct.pack(">d", value)
        elif isinstance(value, str):
            data = value.encode("utf-8", "surrogatepass")
            code += b"X" + struct.pack("<I", len(data)) + data
        elif isinstance(value, np.ndarray):
            self._tensor(value)
        elif isinstance(value, Mapping):
            code += b"}("
            for key, each in value.items():
                self.write(key)
                self.write(each)
            code += b"u"
        elif isinstance(value, Sequence):
            code += b"](" if isinstance(value, list) else b"("
            for each in value:
                self.write(each)
            code += b"e" if isinstance(value, list) else b"t"
        else:
            raise TypeError(f"cannot save a {type(value).__name__}")

    def _tensor(self, array: np.ndarray[Any, Any]) -> None:
        dtype = array.dtype.name
        storage = _STORAGES.get(dtype)
        is_typed = storage is not None
        self.code += b"ctorch._utils\n_rebuild_tensor_v2\n(" if is_typed else b"ctorch._utils\n_rebuild_tensor_v3\n("
        key, count = str(len(self.arrays)), array.size if is_typed else array.nbytes
        self.code += b"("
        self.write("storage")
        self.code += f"ctorch\n{storage}\n".encode() if is_typed else b"ctorch.storage\nUntypedStorage\n"
        self.write(key)
        self.write("cpu")
        self.write(count)
        self.code += b"tQ"
        self.write(0)
        self.write(tuple(array.shape))
        self.write(tuple(prod(array.shape[i + 1 :]) for i in range(array.ndim)))
        self.code += b"\x89ccollections\nOrderedDict\n)R"
        if not is_typed:
            self.code += f"ctorch\n{dtype}\n".encode()
        self.code += b"tR"
        self.arrays.append(array)
