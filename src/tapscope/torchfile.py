"""TorchFile: what ``torch.save`` wrote, read without torch, with tensors as mapped views; nothing in it is executed.

Since torch 1.6 such a file is a zip archive of stored members: ``NAME/data.pkl`` builds the object, ``NAME/data/KEY``
are the bytes of its storages.
"""

import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapscope import dtypes
from tapscope.errors import RunCorruptError
from tapscope.opcodes import MAX_BYTES, Constructor, PickleProblem, read
from tapscope.stored import Tensor

_STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_MAX_SPREAD = 1 << 30
"""Most bytes of a tensor whose strides make it larger than its storage (``expand``)."""


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str | None
    """None for untyped bytes."""
    offset: int
    nbytes: int


class _Named(str):
    """A dtype or a storage type, as the name of an element type."""

    __slots__ = ()


def load(path: Path) -> Any:
    """The object in a file: containers, numbers and texts as they are, tensors as :class:`Tensor`.

    Raises RunCorruptError that names the file and what is wrong with it: damaged, not a zip archive (torch before 1.6),
    or a global beyond tensors, which is never executed.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            return _Reader(archive, file.fileno()).load()
    except (PickleProblem, zipfile.BadZipFile) as error:
        raise RunCorruptError(f"{path}: {_sentence(path, error)}") from None
    except (OSError, ValueError, EOFError, NotImplementedError, RuntimeError, MemoryError) as error:
        raise RunCorruptError(f"{path}: cannot be read: {error}") from None


def _sentence(path: Path, error: Exception) -> str:
    if isinstance(error, PickleProblem):
        return str(error)
    size = path.stat().st_size
    if not size:
        return "is empty: its writer was stopped, or the disk was full"
    with path.open("rb") as file:
        start = file.read(2)
    if start == b"\x80\x02":
        return "was saved in the form that torch wrote before 1.6; load it and save it again with a newer torch"
    if start == b"PK":
        return f"is cut off or damaged ({size:,} bytes): its writer was stopped, or the disk was full"
    return "is no file that torch.save wrote"


class _Reader:
    """One open archive."""

    def __init__(self, archive: zipfile.ZipFile, fileno: int) -> None:
        self._archive = archive
        self._members = {info.filename: info for info in archive.infolist()}
        root = next((name for name in self._members if name.rpartition("/")[2] == "data.pkl"), None)
        if root is None:
            raise PickleProblem("is a zip archive, but holds no data.pkl: torch.save did not write it")
        self._root = root.removesuffix("data.pkl")
        self._file = archive.fp
        self._storages: dict[str, tuple[int, int]] = {}

    def load(self) -> Any:
        order = self._members.get(f"{self._root}byteorder")
        if order is not None and order.file_size < 16 and self._archive.read(order) == b"big":
            raise PickleProblem("was saved on a big-endian machine")
        info = self._members[f"{self._root}data.pkl"]
        if info.file_size > MAX_BYTES:
            raise PickleProblem(f"its pickle has {info.file_size:,} bytes, at most {MAX_BYTES:,} are read")
        return read(self._archive.read(info), _KNOWN, self._storage)

    def _storage(self, identity: Any) -> _Storage:
        """A persistent id: ("storage", type, key, device, number of elements)."""
        if not (isinstance(identity, tuple) and len(identity) == 5 and identity[0] == "storage"):
            raise PickleProblem("its pickle names something that is no storage")
        _, kind, key, _, count = identity
        if not isinstance(kind, _Named) or not isinstance(key, str) or not isinstance(count, int):
            raise PickleProblem("its pickle describes a storage wrongly")
        if key not in self._storages:
            self._storages[key] = self._locate(key)
        offset, nbytes = self._storages[key]
        return _Storage(None if kind == "untyped" else str(kind), offset, nbytes)

    def _locate(self, key: str) -> tuple[int, int]:
        """(offset in the file, bytes) of a storage."""
        info = self._members.get(f"{self._root}data/{key}")
        if info is None:
            raise PickleProblem(f"lacks the bytes of its storage {key[:40]!r}")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise PickleProblem("is a compressed archive, which torch.save does not write")
        assert self._file is not None
        self._file.seek(info.header_offset)
        header = self._file.read(30)  # the local header repeats the name, with an extra field of its own length
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            raise PickleProblem(f"is damaged where its storage {key[:40]!r} should begin")
        offset = (
            info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:], "little")
        )
        self._file.seek(0, 2)
        if offset + info.file_size > self._file.tell():
            raise PickleProblem(f"is cut off within its storage {key[:40]!r}")
        return offset, info.file_size


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *more: Any) -> Tensor:
    """``torch._utils._rebuild_tensor_v2`` and ``_v3``; the latter's fourth further argument is the dtype."""
    if not isinstance(storage, _Storage):
        raise PickleProblem("its pickle makes a tensor of what is no storage")
    dtype = storage.dtype
    if any(isinstance(each, dict) and (each.get("conj") or each.get("neg")) for each in more):
        raise PickleProblem("holds a tensor whose conjugate or negative was never computed: save .resolve_conj() of it")
    if len(more) > 2 and isinstance(more[2], _Named):
        dtype = str(more[2])
    if dtype is None or dtype == "untyped":
        raise PickleProblem("its pickle makes a tensor without a type")
    shape, strides = _sizes(shape), _sizes(strides)
    if len(shape) != len(strides) or len(shape) > 64 or not _is_size(offset):
        raise PickleProblem("its pickle gives a tensor a shape that does not fit its strides")
    width = dtypes.itemsize(dtype)
    found = Tensor(dtype, shape, strides, storage.offset + (0 if 0 in shape else offset * width))
    if found.end > storage.offset + storage.nbytes:
        raise PickleProblem(f"its pickle gives a tensor of shape {shape[:8]} a storage of {storage.nbytes:,} bytes")
    if found.nbytes > max(storage.nbytes, _MAX_SPREAD):
        raise PickleProblem(f"its pickle spreads {storage.nbytes:,} bytes over a tensor of shape {shape[:8]}")
    return found


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(map(_is_size, value)):
        raise PickleProblem("its pickle gives a tensor a shape that is no row of numbers")
    return value


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _subclass(make: Any, _: Any, arguments: Any, *state: Any) -> Any:
    """``torch._tensor._rebuild_from_type_v2``: a tensor with attributes of its own, which mean nothing here."""
    if not isinstance(make, Constructor) or not isinstance(arguments, tuple):
        raise PickleProblem("its pickle describes a tensor wrongly")
    return make.make(*arguments)


def _ordered(*items: Any) -> dict[Any, Any]:
    return dict(_pairs(items[0])) if items else {}


def _pairs(items: Any) -> Any:
    if isinstance(items, list) and all(
        isinstance(i, list | tuple) and len(i) == 2 and isinstance(i[0], str) for i in items
    ):
        return items
    raise PickleProblem("its pickle makes an ordered dict of what is no list of pairs")


def _size(items: Any = ()) -> tuple[Any, ...]:
    return _sizes(tuple(items) if isinstance(items, list) else items)


def _device(*words: Any) -> str:
    return ":".join(str(word) for word in words if isinstance(word, str | int))[:80]


def _set(items: Any = ()) -> set[Any]:
    if not isinstance(items, list | tuple) or not all(isinstance(i, str | int | float) for i in items):
        raise PickleProblem("its pickle makes a set of what is no list of texts or numbers")
    return set(items)


def _encoded(text: Any, encoding: Any) -> bytes:
    """``_codecs.encode``, by which pickles of protocol 2 write bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise PickleProblem("its pickle describes bytes wrongly")
    return text.encode("latin1")


_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _subclass,
    ("collections", "OrderedDict"): _ordered,
    ("torch", "Size"): _size,
    ("torch", "device"): _device,
    ("builtins", "set"): _set,
    ("__builtin__", "set"): _set,
    ("_codecs", "encode"): _encoded,
}
_KNOWN: dict[tuple[str, str], Any] = {
    **{place: Constructor(make) for place, make in _CALLS.items()},
    **{("torch", kind): _Named(dtype) for kind, dtype in _STORAGES.items()},
    **{("torch", name): _Named(name) for name in dtypes.NAMES},
    ("torch.storage", "UntypedStorage"): _Named("untyped"),
    ("torch", "Tensor"): _Named("Tensor"),
    ("torch.nn.parameter", "Parameter"): _Named("Parameter"),
}
