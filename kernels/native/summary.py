"""Hash, bag and statistics of a tensor in one pass over its bytes; the dumper calls this in every hook."""

import ctypes
import struct
from typing import Any

import numpy as np

from tapscope.core import dtypes
from tapscope.kernels.native import library
from tapscope.kernels.native.digests import finish_hash, partial_hash
from tapscope.kernels.native.reference import Summary, summarize_reference, text_of, to_words
from tapscope.run_format.record import Stats

Array = np.ndarray[Any, Any]

MIN_BYTES_WITHOUT_GIL = 1 << 20
"""Below this size the GIL is kept, see py_util.h."""

_LAYOUT = struct.Struct("=7q5d3Q")  # struct Summary in summary.h

ROW_BYTES = _LAYOUT.size
"""Size of a struct Summary in bytes: seven counts, five floats, the two hash words and the bag."""

_PLANS = {name: (code, 1, dtypes.itemsize(name)) for name, code in library.CODES.items()} | {
    name: (library.CODES[part], 2, dtypes.itemsize(part)) for name, part in dtypes.COMPLEX.items()
}
"""dtype name -> (dtype code, scalars per element, bytes per scalar); a complex element has two scalars."""


def plan_of(dtype: str) -> tuple[int, int, int] | None:
    """Return (dtype code, scalars per element, bytes per scalar); None for a dtype that the C++ library does not
    support."""
    return _PLANS.get(dtype)


def take(address: int, count: int, dtype: str, target: int = 0, bag: bool = True) -> tuple[bytes, bytes]:
    """Summarize ``count`` contiguous elements at ``address`` and, unless ``target`` is 0, copy them there.

    Returns (text, digest): the fields ``hash``, ``bag`` and ``stats`` as :func:`.record.encode` writes them, without
    braces; and the hash as 16 bytes, for use as a dict key.

    Neither address needs alignment; the two ranges must not overlap. ``dtype`` is a name of
    :data:`tapscope.core.dtypes.NAMES`; a complex element counts as two. Without ``bag``, the bag is omitted from the
    text, which saves a quarter of the time. The memory must stay alive and unchanged during the call. The GIL is
    released from :data:`MIN_BYTES_WITHOUT_GIL` bytes on. Raises RunCorruptError for an unknown dtype.
    """
    functions, plan = library.functions(), _PLANS.get(dtype)
    if functions is None or plan is None:
        return _take_reference(address, count, dtype, target, bag)
    code, parts, width = plan
    return functions.take(address, count * parts, code, bag, target, width)


def tell(address: int) -> tuple[bytes, bytes]:
    """Return (text, digest) as :func:`take` does, from a struct Summary that a device has computed.

    ``address`` points to :data:`ROW_BYTES` bytes of host memory.
    """
    functions = library.functions()
    if functions is not None:
        return functions.tell(address)
    summary = _unpack(ctypes.string_at(address, ROW_BYTES))
    return text_of(summary), bytes.fromhex(summary.hash)


def digest_of(address: int, nbytes: int) -> bytes:
    """Return the hash of ``nbytes`` bytes at ``address``, equal to the digest of :func:`take` for equal bytes.

    The memory must stay alive and unchanged during the call; the GIL is released as in :func:`take`.
    """
    functions = library.functions()
    if functions is not None:
        return functions.digest_of(address, nbytes)
    return finish_hash(*partial_hash(to_words(_view(address, nbytes, "uint8")), 0), nbytes)


def summarize(address: int, count: int, dtype: str) -> Summary:
    """Summarize ``count`` contiguous elements at ``address`` as numbers, without a copy; raises as :func:`take`."""
    functions, plan = library.functions(), _PLANS.get(dtype)
    if functions is None or plan is None:
        return summarize_reference(_view(address, count, dtype))
    code, parts, _ = plan
    room: Any = ctypes.create_string_buffer(_LAYOUT.size)
    functions.summarize(address, count * parts, code, True, 0, ctypes.addressof(room))
    return _unpack(room)


def summarize_array(array: Array) -> Summary:
    """Summarize a C-contiguous numpy array of any supported dtype.

    Raises as :func:`take`, and ValueError if the array is not C-contiguous or not in native byte order.
    """
    if not (array.flags.c_contiguous and array.dtype.isnative):
        raise ValueError(f"array of shape {array.shape} must be C-contiguous and native; use np.ascontiguousarray")
    return summarize(array.ctypes.data, array.size, array.dtype.name)


def _unpack(room: Any) -> Summary:
    values = _LAYOUT.unpack_from(room)
    total, nan, posinf, neginf, zeros, subnormals, finite, low, high, absmax, added, squares, h1, h2, bag = values
    if not finite:
        low = high = absmax = None
    stats = Stats(total, nan, posinf, neginf, zeros, subnormals, low, high, absmax, added, squares)
    return Summary(stats, f"{h1:016x}{h2:016x}", f"{bag:016x}")


def _take_reference(address: int, count: int, dtype: str, target: int, bag: bool) -> tuple[bytes, bytes]:
    array = _view(address, count, dtype)
    summary = summarize_reference(array)
    if not bag:
        summary = summary._replace(bag=None)
    if target:
        ctypes.memmove(target, address, array.nbytes)
    return text_of(summary), bytes.fromhex(summary.hash)


class _Memory:
    """Borrowed memory, exposed to numpy through the array interface."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, True)}


def _view(address: int, count: int, dtype: str) -> Array:
    kind = dtypes.numpy_dtype(dtype)
    if not count:
        return np.empty(0, kind)
    return np.asarray(_Memory(address, count * kind.itemsize)).view(kind)
