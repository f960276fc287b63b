"""Which backend is used, and why: the compiled library next to this file, or numpy."""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from tapscope.core import dtypes
from tapscope.core.errors import ConfigError

ABI = 15
"""Must equal ``TS_ABI`` in common.h: a library left over from another version is not called."""

CODES: dict[str, int] = {name: code for code, name in enumerate(n for n in dtypes.NAMES if n not in dtypes.COMPLEX)}
"""Element type -> the number common.h gives it; a complex number is two of its parts."""

CODES_BY_TYPE: dict[np.dtype[Any], int] = {dtypes.numpy_dtype(name): code for name, code in CODES.items()}
"""The same by numpy type, because ``dtype.name`` takes longer than the rest of a small call."""

_VARIABLE = "TAPSCOPE_NATIVE"
_SETTINGS = {
    "0": "numpy only",
    "1": "the C++ library if it was built",
    "avx2": "the same without what is written for 64-byte vectors",
}
_ADDRESS, _INT64 = ctypes.c_void_p, ctypes.c_int64


class Functions(NamedTuple):
    """The C++ entry points; each takes addresses as integers."""

    take: Callable[[int, int, int, bool, int, int], tuple[bytes, bytes]]
    """(data, count, dtype code, with bag, copy to or 0, bytes of an element) -> (text, digest)"""
    digest_of: Callable[[int, int], bytes]
    """(data, number of bytes) -> digest"""
    summarize: Any
    """(data, count, dtype code, with bag, copy to or 0, out)"""
    compare: Callable[[list[tuple[Any, ...]], float, float, Any, Any, Any, Any], None]
    """(strips, atol, rtol, floats out, integers out, at worst out, strip out), see :mod:`.strips`; a side of a strip
    may be a tuple (dtype code of the sum, its summands…)"""
    channel_sums: Callable[..., None]
    """(baseline, target, dtype codes x2, row indices x2 or None, first row, first column, sums to add to)"""
    find_channel: Callable[[Any], bytes | None]
    """(sums) -> index, gain, noise; None where sums are not finite"""
    overviews: Callable[[Any, Any, Any, Any, Any], bytes]
    """(floats, integers, at worst, bounds of sections, errors out) -> a struct Overview for each section"""
    deviation: Callable[[list[tuple[Any, ...]], int, float], tuple[Any, ...]]
    """(strips as for ``compare``, their rows, share or -1) -> the members of a :class:`.Deviation`"""
    record_template: Callable[..., Any]
    """(head, tail, torch.dtype, torch.Size, elements, element size, dtype code) -> RecordTemplate"""
    record_writer: Callable[..., Any]
    """(exact types of plain tensors, their DLPack interface or None, tensor -> dispatch keys, set of plain ones, () ->
    number of the autograd engine's task, ContextVar of tags, its value where there are none) -> RecordWriter"""
    fast_path: Callable[[Any], Any]
    """RecordWriter -> FastPath, see hook_fastpath.cpp"""
    tell: Callable[[int], tuple[bytes, bytes]]
    """(struct Summary) -> (text, digest)"""
    compose_rows: Callable[..., bytes]
    """(address, heads, tails, offsets of structs Summary as int64 or -1, step, number of the first, ends or nothing) ->
    record lines; heads, tails and ends are tuples of bytes"""
    linear: Callable[..., bool]
    """(x, w, bias or 0, y, rows, row stride of x, outs, ins, dtype code, threads) -> whether y was computed, which some
    processors cannot"""
    grouped_linear: Callable[..., bool]
    """(x, w, ends, y, rows, groups, outs, ins, most rows of a group, dtype code, threads) -> whether y was computed"""
    paged: Callable[..., bool]
    """(query, keys, values, table, lengths, out, requests, heads, kv heads, key dim, value dim, value stride, page
    size, table stride, window or 0, dtype code, dtype code of keys and values, threads, scale, scales of keys and of
    values) -> whether it was computed"""
    sketch: Callable[..., None]
    """(data, dtype code, columns of a row, rows, keys, runs, counters to add to), see :mod:`.sketch`"""
    set_captures: Callable[[int], None]
    """Tells fast paths how many captures of CUDA graphs are under way: what fires in them is not for these."""
    copy_async: Callable[..., bool]
    """(device, stream, event, copies as int64: to, from, bytes of each, None or what completes rows of statistics
    first, None or (side stream, copies on it after those)) -> whether they were started, and then the event recorded,
    see dumper/device/driver_copies.py"""
    module_call: Any
    """What stands in the ``_call_impl`` of a module with taps, see module_call.cpp"""
    launch_kernel: Callable[..., int | None]
    """(CUfunction, grid of three, threads, bytes of shared memory, whether it overlaps, stream, parameters of 64 bits
    each) -> the CUDA driver's code, 0 if the kernel was launched; None without a driver"""
    numbers: Callable[[], Any]
    """() -> an iterator from 0, whose ``take(N)`` gives the first of N numbers in a row"""


class _Choice(NamedTuple):
    functions: Functions | None
    kind: Literal["c++", "numpy"]
    why: str


_choice: _Choice | None = None


def backend() -> tuple[str, str]:
    """``("c++", path of the library)`` or ``("numpy", why there is no library)``.

    Raises ConfigError when TAPSCOPE_NATIVE is set to anything but 0, 1 or avx2.
    """
    choice = _chosen()
    return choice.kind, choice.why


def functions() -> Functions | None:
    """The C++ entry points, or None where numpy serves; raises as :func:`backend`."""
    return (_choice or _chosen()).functions


@contextmanager
def use_backend(kind: Literal["c++", "numpy"]) -> Iterator[None]:
    """Serve with this backend inside the ``with`` block, in every thread; for tests and for measuring.

    Raises ConfigError when ``c++`` is asked for and no library can be loaded; the message says why.
    """
    global _choice
    before = _choice
    wanted = _load() if kind == "c++" else _Choice(None, "numpy", "chosen by use_backend('numpy')")
    if wanted.kind != kind:
        raise ConfigError(f"use_backend({kind!r}): {wanted.why}")
    _choice = wanted
    try:
        yield
    finally:
        _choice = before


def _chosen() -> _Choice:
    global _choice
    if _choice is None:
        setting = os.environ.get(_VARIABLE, "1") or "1"
        if setting not in _SETTINGS:
            rule = " or ".join(f"{value} ({meaning})" for value, meaning in _SETTINGS.items())
            raise ConfigError(f"{_VARIABLE}={setting!r} must be {rule}")
        _choice = _Choice(None, "numpy", f"{_VARIABLE}=0") if setting == "0" else _load()
    return _choice


def _load() -> _Choice:
    folder = Path(__file__).parent
    candidates = [folder / f"_tapscope{suffix}" for suffix in EXTENSION_SUFFIXES]
    path = next((p for p in candidates if p.exists()), None)
    if path is None:
        return _Choice(
            None, "numpy", "the C++ library was not built; reinstall tapscope where a C++17 compiler is found"
        )
    try:
        library = ctypes.CDLL(str(path))
        abi = library.ts_abi()
        if abi != ABI:
            why = f"{path.name} was built for interface {abi}, not {ABI}; reinstall tapscope"
            return _Choice(None, "numpy", why)
        return _Choice(_typed(library, import_module(f"{__package__}._tapscope")), "c++", str(path))
    except (OSError, AttributeError, ImportError) as error:
        return _Choice(None, "numpy", f"{path.name} cannot be loaded: {error}")


def _typed(library: ctypes.CDLL, module: Any) -> Functions:
    """The same file is a library and a module: calls at every hook are the module's, the others need no haste."""
    summary = [_ADDRESS, _INT64, ctypes.c_int, ctypes.c_int, _ADDRESS, _ADDRESS]
    return Functions(
        take=module.take,
        digest_of=module.digest_of,
        summarize=_function(library.ts_summarize, None, summary),
        compare=module.compare,
        channel_sums=module.channel_sums,
        find_channel=module.find_channel,
        overviews=module.overviews,
        deviation=module.deviation,
        record_template=module.RecordTemplate,
        record_writer=module.RecordWriter,
        fast_path=module.FastPath,
        tell=module.tell,
        compose_rows=module.compose_rows,
        linear=module.linear,
        grouped_linear=module.grouped_linear,
        paged=module.paged,
        sketch=module.sketch,
        set_captures=module.set_captures,
        copy_async=module.copy_async,
        module_call=module.ModuleCall,
        launch_kernel=module.launch_kernel,
        numbers=module.Numbers,
    )


def _function(entry: Any, result: Any, arguments: list[Any]) -> Any:
    entry.restype, entry.argtypes = result, arguments
    return entry
