"""Reader for ``torch.save`` files without torch; tensors become mapped views, and no code in the file is executed.

Since torch 1.6, the file is an uncompressed ZIP archive: ``NAME/data.pkl`` builds the object, ``NAME/data/KEY`` are the
bytes of its storages.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapscope.core import dtypes
from tapscope.core.errors import RunCorruptError
from tapscope.core.regular_files import open_regular, read_small, reading
from tapscope.run_format.tensor_layout import Tensor
from tapscope.sglang.pickle_template import PickleTemplates
from tapscope.sglang.safe_unpickler import MAX_BYTES, Constructor, LenientNames, PickleProblem, check_keys, read
from tapscope.sglang.zip_archive import Archive, ArchiveProblem, FileEnd

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
_MAX_EXPANDED = 128 << 20
"""Maximum number of bytes by which the tensors of a file may exceed their storages in total (``expand``)."""


@dataclass(slots=True)
class _ExpandBudget:
    """Remaining number of bytes by which the tensors of one file may exceed their storages."""

    left: int = _MAX_EXPANDED


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str | None
    """None for untyped bytes."""
    offset: int
    nbytes: int
    budget: _ExpandBudget


class _DtypeName(str):
    """The dtype of a storage type or torch dtype, as a name."""

    __slots__ = ()


def load(path: Path, templates: PickleTemplates | None = None, *, is_lenient: bool = False) -> Any:
    """Load the object in a file: containers, numbers and strings unchanged, tensors as :class:`Tensor`.

    ``templates``, shared by all files of a directory, speed up reading. With ``is_lenient``, an object of an unknown
    class becomes a :class:`~.safe_unpickler.Placeholder` instead of an error. No code is executed in either case.

    Raises RunCorruptError with the file and the reason: damaged, not a ZIP archive (torch before 1.6), or an
    unsupported global.
    """
    return load_with_end(path, templates, is_lenient=is_lenient)[0]


def load_with_end(
    path: Path | str, templates: PickleTemplates | None = None, *, is_lenient: bool = False
) -> tuple[Any, FileEnd]:
    """Like :func:`load`, but also return the last bytes of the file, which are read in any case."""
    try:
        fd = open_regular(path)
        try:
            archive = Archive(fd)
            return _Reader(archive).load(templates, _LENIENT if is_lenient else _KNOWN), archive.end
        finally:
            os.close(fd)
    except PickleProblem as error:
        raise RunCorruptError(f"{path}: {error}") from None
    except ArchiveProblem as error:
        raise RunCorruptError(f"{path}: {_diagnosis(path, error)}") from None
    except OSError as error:
        raise RunCorruptError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, MemoryError) as error:
        raise RunCorruptError(f"{path}: cannot be read: {error or type(error).__name__}") from None


def load_part(path: Path, at: int, nbytes: int) -> Any:
    """Like :func:`load`, for an archive of ``nbytes`` at byte ``at`` of a file; tensor offsets are relative to the
    file."""
    try:
        with reading(path) as file:
            return _Reader(Archive(file.fileno(), at, nbytes)).load(None, _KNOWN)
    except OSError as error:
        raise RunCorruptError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, MemoryError) as error:
        raise RunCorruptError(f"{path}: at byte {at:,}: {error or type(error).__name__}") from None


def read_pickle(path: Path, known: Mapping[tuple[str, str], Any]) -> Any:
    """Unpickle a file without executing code: tensors and the globals in ``known`` are built, any other global becomes
    a placeholder.

    Raises RunCorruptError.
    """
    try:
        return read(read_small(path, MAX_BYTES), LenientNames({**_KNOWN, **known}), _no_storage)
    except OSError as error:
        raise RunCorruptError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, MemoryError) as error:
        raise RunCorruptError(f"{path}: {error or type(error).__name__}") from None


def _no_storage(_: Any) -> Any:
    raise PickleProblem("its pickle references a storage")


def damaged(path: Path, at: int = 0, nbytes: int | None = None) -> list[tuple[int, int, str]] | None:
    """Return (first byte, end, name) of archive members whose CRC-32 does not match.

    ``at`` and ``nbytes`` give the position of an archive within the file. None for a file saved without checksums
    (``set_crc32_options(False)``). Raises RunCorruptError.
    """
    try:
        with reading(path) as file:
            return Archive(file.fileno(), at, nbytes).damaged()
    except OSError as error:
        raise RunCorruptError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise RunCorruptError(f"{path}: {error}") from None


def _diagnosis(path: Path | str, error: Exception) -> str:
    with reading(path) as file:
        start, size = file.read(2), os.fstat(file.fileno()).st_size
    if not size:
        return "empty: its writer was stopped, or the disk was full"
    if start == b"\x80\x02":
        return "saved in the form that torch wrote before 1.6; load it and save it again with a newer torch"
    if start == b"PK":
        return f"{error}; it is cut off or damaged ({size:,} bytes): its writer was stopped, or the disk was full"
    return "not a torch.save file"


class _Reader:
    """Reader of one open archive."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        root = next((name for name in archive.members if name.rpartition("/")[2] == "data.pkl"), None)
        if root is None:
            raise PickleProblem("is a zip archive, but holds no data.pkl: torch.save did not write it")
        self._root = root.removesuffix("data.pkl")
        self._storages: dict[str, tuple[int, int]] = {}
        self._budget = _ExpandBudget()

    def load(self, templates: PickleTemplates | None, known: Mapping[tuple[str, str], Any]) -> Any:
        order = self._archive.members.get(f"{self._root}byteorder")
        if order is not None and order.nbytes < 16 and self._archive.read(f"{self._root}byteorder", 16) == b"big":
            raise PickleProblem("was saved on a big-endian machine")
        data = self._archive.read(f"{self._root}data.pkl", MAX_BYTES)
        if templates is not None:
            return templates.read(data, known, self._storage, self._place)
        return read(data, known, self._storage)

    def _storage(self, identity: Any) -> _Storage:
        """Resolve a persistent id: ("storage", type, key, device, number of elements)."""
        if not (isinstance(identity, tuple) and len(identity) == 5 and identity[0] == "storage"):
            raise PickleProblem("its pickle references something that is not a storage")
        _, kind, key, _, count = identity
        if not isinstance(kind, _DtypeName) or not isinstance(key, str) or not isinstance(count, int):
            raise PickleProblem("its pickle describes a storage wrongly")
        offset, nbytes = self._place(key)
        return _Storage(None if kind == "untyped" else str(kind), offset, nbytes, self._budget)

    def _place(self, key: str) -> tuple[int, int]:
        """Return (offset, number of bytes) of a storage."""
        if key not in self._storages:
            name = f"{self._root}data/{key}"
            if name not in self._archive.members:
                raise PickleProblem(f"lacks the bytes of its storage {key[:40]!r}")
            self._storages[key] = self._archive.place(name), self._archive.members[name].nbytes
        return self._storages[key]


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *more: Any) -> Tensor:
    """Build a tensor: ``torch._utils._rebuild_tensor_v2`` and ``_v3``; the third of ``more`` in v3 is the dtype."""
    if not isinstance(storage, _Storage):
        raise PickleProblem("its pickle builds a tensor from something that is not a storage")
    dtype = storage.dtype
    if any(isinstance(each, dict) and (each.get("conj") or each.get("neg")) for each in more):
        raise PickleProblem("holds a tensor whose conjugate or negative was never computed: save .resolve_conj() of it")
    if len(more) > 2 and isinstance(more[2], _DtypeName):
        dtype = str(more[2])
    if dtype is None or dtype == "untyped":
        raise PickleProblem("its pickle makes a tensor without a type")
    shape, strides = _sizes(shape), _sizes(strides)
    if len(shape) != len(strides) or len(shape) > 64 or not _is_size(offset):
        raise PickleProblem("its pickle gives a tensor a shape that does not fit its strides")
    width = dtypes.itemsize(dtype)
    tensor = Tensor(dtype, shape, strides, storage.offset + (0 if 0 in shape else offset * width))
    if tensor.end > storage.offset + storage.nbytes:
        raise PickleProblem(f"its pickle gives a tensor of shape {shape[:8]} a storage of {storage.nbytes:,} bytes")
    storage.budget.left -= max(tensor.nbytes - storage.nbytes, 0)
    if storage.budget.left < 0:
        raise PickleProblem(
            f"its pickle spreads {storage.nbytes:,} bytes over a tensor of shape {shape[:8]}: save a copy of an "
            f"expanded tensor that is larger than {_MAX_EXPANDED >> 20} MiB (.contiguous())"
        )
    return tensor


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(map(_is_size, value)):
        raise PickleProblem("its pickle gives a tensor an invalid shape")
    return value


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _subclass(make: Any, _: Any, arguments: Any, *state: Any) -> Any:
    """Build a tensor subclass: ``torch._tensor._rebuild_from_type_v2``; its extra attributes are ignored."""
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
    raise PickleProblem("its pickle makes an ordered dict of what is not a list of pairs")


def _size(items: Any = ()) -> tuple[Any, ...]:
    return _sizes(tuple(items) if isinstance(items, list) else items)


def _device(*words: Any) -> str:
    return ":".join(str(word) for word in words if isinstance(word, str | int))[:80]


def _set(items: Any = ()) -> set[Any]:
    if not isinstance(items, list | tuple):
        raise PickleProblem("its pickle makes a set of what is not a list")
    check_keys(items)
    return set(items)


def _encode(text: Any, encoding: Any) -> bytes:
    """Replacement for ``_codecs.encode``, which pickles of protocol 2 use for bytes."""
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
    ("_codecs", "encode"): _encode,
}
_KNOWN: dict[tuple[str, str], Any] = {
    **{place: Constructor(make) for place, make in _CALLS.items()},
    **{("torch", kind): _DtypeName(dtype) for kind, dtype in _STORAGES.items()},
    **{("torch", name): _DtypeName(name) for name in dtypes.NAMES},
    ("torch.storage", "UntypedStorage"): _DtypeName("untyped"),
    ("torch", "Tensor"): _DtypeName("Tensor"),
    ("torch.nn.parameter", "Parameter"): _DtypeName("Parameter"),
}
_LENIENT = LenientNames(_KNOWN)
