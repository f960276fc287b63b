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

BRIEF = 1 << 20
"""Bytes below which the GIL is kept: to get it back from a busy thread takes up to 5 ms, the work itself below 0.2."""

_LAYOUT = struct.Struct("=7q5d3Q")  # struct Summary in summary.h
_DIGEST = slice(_LAYOUT.size, _LAYOUT.size + 16)
_TEXT = _DIGEST.stop
_ROOM = _TEXT + 448  # struct Taken in stats.cpp


def _plans() -> dict[str, tuple[int, int, int]]:
    plans = {name: (code, 1, BRIEF // dtypes.itemsize(name)) for name, code in library.CODES.items()}
    for name, part in dtypes.COMPLEX.items():
        plans[name] = (library.CODES[part], 2, BRIEF // dtypes.itemsize(name))
    return plans


_PLANS = _plans()
"""Element type -> its code, the elements that one counts as, and how many are brief work."""


class Taken(NamedTuple):
    """What the record line of one tensor needs."""

    text: bytes
    """The members ``hash``, ``bag`` and ``stats`` as :func:`tapscope.record.encode` writes them, without braces."""
    digest: bytes
    """The hash as 16 bytes, for a key of a dict."""


class _Scratch(threading.local):
    """One result buffer a thread, so that a call allocates nothing."""

    def __init__(self) -> None:
        buffer: Any = ctypes.create_string_buffer(_ROOM)
        self.room = buffer, ctypes.addressof(buffer)
        digest: Any = ctypes.create_string_buffer(16)
        self.digest = digest, ctypes.addressof(digest)
        self.latest: Summary | bool = True
        """What :func:`last` answers; until it is asked, whether the bag in the buffer means anything."""


_scratch = _Scratch()


def take(address: int, count: int, dtype: str, target: int = 0, bag: bool = True) -> Taken:
    """Summarise ``count`` neighbouring elements at ``address`` and, where ``target`` is not 0, copy them there.

    Neither address need be aligned, and the two must not overlap. ``dtype`` is a name of
    :data:`tapscope.dtypes.NAMES`; a complex number is taken as two elements. Without ``bag`` none is worked out (which
    saves a quarter of the time) and the text lacks it. The memory must stay alive and unchanged during the call.
    The GIL is released for :data:`BRIEF` bytes and more. Raises RunCorruptError for an unknown dtype.
    """
    functions = library.functions()
    if functions is None or dtype not in _PLANS:
        return _take_reference(address, count, dtype, target, bag)
    code, parts, brief = _PLANS[dtype]
    scratch = _scratch
    buffer, room = scratch.room
    call = functions.take_brief if count < brief else functions.take
    size = call(address, count * parts, code, bag, target, room)
    scratch.latest = bag
    return Taken(buffer[_TEXT : _TEXT + size], buffer[_DIGEST])


def last() -> Summary:
    """What the latest :func:`take` or :func:`summarize` of this thread found; empty before the first."""
    scratch = _scratch
    if isinstance(scratch.latest, bool):
        scratch.latest = _unpack(scratch.room[0], scratch.latest)
    return scratch.latest


def digest_of(address: int, nbytes: int) -> bytes:
    """The hash of ``nbytes`` bytes at ``address``: equal to ``take(...).digest`` where the bytes are equal.

    The memory must stay alive and unchanged during the call; the GIL as in :func:`take`.
    """
    functions = library.functions()
    if functions is None:
        words = to_words(_view(address, nbytes, "uint8"))
        return finish_hash(*partial_hash(words, 0), nbytes)
    buffer, room = _scratch.digest
    (functions.hash_brief if nbytes < BRIEF else functions.hash)(address, nbytes, room)
    found: bytes = buffer.raw
    return found


def summarize(address: int, count: int, dtype: str) -> Summary:
    """The same without the text and without a copy; raises as :func:`take`."""
    functions = library.functions()
    if functions is None or dtype not in _PLANS:
        found = summarize_reference(_view(address, count, dtype))
    else:
        code, parts, _ = _PLANS[dtype]
        buffer, room = _scratch.room
        functions.summarize(address, count * parts, code, True, 0, room)
        found = _unpack(buffer, True)
    _scratch.latest = found
    return found


def summarize_array(array: Array) -> Summary:
    """Summarise a C-contiguous numpy array of any supported dtype; raises as :func:`take`, and ValueError."""
    if not (array.flags.c_contiguous and array.dtype.isnative):
        raise ValueError(f"array of shape {array.shape} must be C-contiguous and native; use np.ascontiguousarray")
    return summarize(array.ctypes.data, array.size, array.dtype.name)


def _unpack(buffer: Any, with_bag: bool) -> Summary:
    values = _LAYOUT.unpack_from(buffer)
    total, nan, posinf, neginf, zeros, subnormals, finite, low, high, absmax, added, squares, h1, h2, bag = values
    if not finite:
        low = high = absmax = None
    stats = Stats(total, nan, posinf, neginf, zeros, subnormals, low, high, absmax, added, squares)
    return Summary(stats, f"{h1:016x}{h2:016x}", f"{bag:016x}" if with_bag else None)


def _take_reference(address: int, count: int, dtype: str, target: int, bag: bool) -> Taken:
    array = _view(address, count, dtype)
    found = summarize_reference(array)
    if not bag:
        found = found._replace(bag=None)
    if target:
        ctypes.memmove(target, address, array.nbytes)
    _scratch.latest = found
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
