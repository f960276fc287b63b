"""Everything that is known of a tensor, in one call and one pass over its bytes: what the dumper runs at every hook."""

import ctypes
import struct
import threading
from typing import Any, NamedTuple

import numpy as np

from tapscope import dtypes
from tapscope.kernels.native import library
from tapscope.kernels.native.digests import finish_hash, partial_hash
from tapscope.kernels.native.reference import Summary, summarize_reference, text_of, to_words
from tapscope.record import Stats

Array = np.ndarray[Any, Any]

_LAYOUT = struct.Struct("=7q5d3Q")  # struct Summary in summary.h
_DIGEST = slice(_LAYOUT.size, _LAYOUT.size + 16)
_TEXT = _DIGEST.stop
_ROOM = _TEXT + 448  # struct Taken in stats.cpp
_CODES = {name: (code, 1) for name, code in library.CODES.items()} | {"complex64": (library.CODES["float32"], 2)}


class Taken(NamedTuple):
    """What the record line of one tensor needs."""

    text: bytes
    """The members ``hash``, ``bag`` and ``stats`` as :func:`tapscope.record.encode` writes them, without braces."""
    digest: bytes
    """The hash as 16 bytes, for a key of a dict."""


class _Scratch(threading.local):
    """One result buffer a thread, so that a call allocates nothing; and what :func:`last` needs."""

    def __init__(self) -> None:
        self.buffer: Any = ctypes.create_string_buffer(_ROOM)
        self.address = ctypes.addressof(self.buffer)
        self.summary: Summary | None = None


_scratch = _Scratch()


def take(address: int, count: int, dtype: str, target: int = 0) -> Taken:
    """Summarise ``count`` neighbouring elements at ``address`` and, where ``target`` is not 0, copy them there.

    Neither address need be aligned, and the two must not overlap. ``dtype`` is a name of
    :data:`tapscope.dtypes.NAMES`; a complex number is taken as two elements. The memory must stay alive and unchanged
    during the call. Raises RunCorruptError for an unknown dtype.
    """
    functions = library.functions()
    if functions is None or dtype not in _CODES:
        return _take_reference(address, count, dtype, target)
    code, parts = _CODES[dtype]
    scratch = _scratch
    size = functions.take(address, count * parts, code, target, scratch.address)
    scratch.summary = None
    buffer = scratch.buffer
    return Taken(buffer[_TEXT : _TEXT + size], buffer[_DIGEST])


def last() -> Summary:
    """What the latest :func:`take` or :func:`summarize` of this thread found; empty before the first."""
    scratch = _scratch
    if scratch.summary is None:
        scratch.summary = _unpack(scratch.buffer)
    return scratch.summary


def digest_of(address: int, nbytes: int) -> bytes:
    """The hash of ``nbytes`` bytes at ``address``: equal to ``take(...).digest`` where the bytes are equal."""
    functions = library.functions()
    if functions is None:
        words = to_words(_view(address, nbytes, "uint8"))
        return finish_hash(*partial_hash(words, 0), nbytes)
    digest = ctypes.create_string_buffer(16)
    functions.hash(address, nbytes, ctypes.addressof(digest))
    return digest.raw


def summarize(address: int, count: int, dtype: str) -> Summary:
    """The same without the text and without a copy; raises as :func:`take`."""
    functions = library.functions()
    if functions is None or dtype not in _CODES:
        return summarize_reference(_view(address, count, dtype))
    code, parts = _CODES[dtype]
    scratch = _scratch
    functions.summarize(address, count * parts, code, 0, scratch.address)
    scratch.summary = _unpack(scratch.buffer)
    return scratch.summary


def summarize_array(array: Array) -> Summary:
    """Summarise a C-contiguous numpy array of any supported dtype; raises as :func:`take`, and ValueError."""
    if not (array.flags.c_contiguous and array.dtype.isnative):
        raise ValueError(f"array of shape {array.shape} must be C-contiguous and native; use np.ascontiguousarray")
    return summarize(array.ctypes.data, array.size, array.dtype.name)


def _unpack(buffer: Any) -> Summary:
    values = _LAYOUT.unpack_from(buffer)
    total, nan, posinf, neginf, zeros, subnormals, finite, low, high, absmax, added, squares, h1, h2, bag = values
    if not finite:
        low = high = absmax = None
    stats = Stats(total, nan, posinf, neginf, zeros, subnormals, low, high, absmax, added, squares)
    return Summary(stats, f"{h1:016x}{h2:016x}", f"{bag:016x}")


def _take_reference(address: int, count: int, dtype: str, target: int) -> Taken:
    array = _view(address, count, dtype)
    found = _scratch.summary = summarize_reference(array)
    if target:
        ctypes.memmove(target, address, array.nbytes)
    return Taken(text_of(found), bytes.fromhex(found.hash))


class _Memory:
    """Borrowed bytes that numpy can look at."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, True)}


def _view(address: int, count: int, dtype: str) -> Array:
    kind = dtypes.numpy_dtype(dtype)
    if not count:
        return np.empty(0, kind)
    return np.asarray(_Memory(address, count * kind.itemsize)).view(kind)
