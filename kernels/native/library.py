"""Backend selection: the compiled extension in this directory, or numpy."""

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
"""Must equal ``TS_ABI`` in common.h: a library built for another version is not called."""

CODES: dict[str, int] = {name: code for code, name in enumerate(n for n in dtypes.NAMES if n not in dtypes.COMPLEX)}
"""dtype name -> dtype code in common.h. A complex dtype has no code: each element counts as two of its real dtype."""

CODES_BY_TYPE: dict[np.dtype[Any], int] = {dtypes.numpy_dtype(name): code for name, code in CODES.items()}
"""numpy dtype -> dtype code. Looking up ``dtype.name`` would take longer than the rest of a small call."""

_VARIABLE = "TAPSCOPE_NATIVE"
_SETTINGS = {
    "0": "numpy only",
    "1": "the C++ library if it was built",
    "avx2": "the same without what is written for 64-byte vectors",
}
_ADDRESS, _INT64 = ctypes.c_void_p, ctypes.c_int64


class Functions(NamedTuple):
    """The C++ entry points. Addresses are passed as integers."""

    take: Callable[[int, int, int, bool, int, int], tuple[bytes, bytes]]
    """(data, count, dtype code, with bag, copy destination or 0, bytes per element) -> (text, digest)"""
    digest_of: Callable[[int, int], bytes]
    """(data, nbytes) -> digest"""
    summarize: Any
    """(data, count, dtype code, with bag, copy destination or 0, struct Summary to fill)"""
    compare: Callable[[list[tuple[Any, ...]], float, float, Any, Any, Any, Any], None]
    """(strips, atol, rtol, floats out, integers out, baseline at worst out, strip out), see :mod:`.row_blocks`; a side
    of a strip may be a tuple (dtype code of the sum, summands…)"""
    channel_sums: Callable[..., None]
    """(baseline, target, dtype codes x2, row indices x2 or None, first row, first column, accumulators)"""
    find_channel: Callable[[Any], bytes | None]
    """(sums) -> packed (index, gain, noise); None where sums are not finite"""
    overviews: Callable[[Any, Any, Any, Any, Any], bytes]
    """(floats, integers, baseline at worst, section bounds, errors out) -> one struct Overview per section"""
    deviation: Callable[[list[tuple[Any, ...]], int, float], tuple[Any, ...]]
    """(strips as for ``compare``, number of rows, share or -1) -> the fields of a :class:`.Deviation`"""
    record_template: Callable[..., Any]
    """(head, tail, torch.dtype, torch.Size, elements, element size, dtype code) -> RecordTemplate"""
    record_writer: Callable[..., Any]
    """(exact types of plain tensors, DLPack exchange API or None, tensor -> dispatch keys, set of plain key sets, () ->
    id of the running autograd graph task, ContextVar of tags, value of that variable without tags) -> RecordWriter"""
    fast_path: Callable[[Any], Any]
    """RecordWriter -> FastPath, see hook_fastpath.cpp"""
    tell: Callable[[int], tuple[bytes, bytes]]
    """(address of a struct Summary) -> (text, digest)"""
    compose_rows: Callable[..., bytes]
    """(base address, heads, tails, offsets of the structs Summary as int64 or -1, step, first sequence number, optional
    ends) -> record lines; heads, tails and ends are tuples of bytes"""
    linear: Callable[..., bool]
    """(x, w, bias or 0, y, rows, row stride of x, outs, ins, dtype code, threads) -> whether y was computed; False if
    the CPU lacks the instructions"""
    grouped_linear: Callable[..., bool]
    """(x, w, group ends, y, rows, groups, outs, ins, maximum rows per group, dtype code, threads) -> whether y was
    computed"""
    paged: Callable[..., bool]
    """(query, keys, values, block table, lengths, out, requests, heads, kv heads, key dim, value dim, value stride,
    page size, table stride, window or 0, dtype code, dtype code of the KV cache, threads, scale, key scale, value
    scale) -> whether the output was computed"""
    sketch: Callable[..., None]
    """(data, dtype code, row width, rows, keys, runs, counters to add to), see :mod:`.sketch`"""
    set_captures: Callable[[int], None]
    """Set the number of CUDA graph captures in progress: fast paths decline firings during capture."""
    copy_async: Callable[..., bool]
    """(device, stream, event, copies as int64 triples (destination, source, nbytes), None or the merge kernel to launch
    first, None or (side stream, copies to run there afterwards)) -> whether the copies were started and the event
    recorded, see dumper/device/driver_copies.py"""
    module_call: Any
    """Replacement for the ``_call_impl`` of a module with taps, see module_call.cpp"""
    launch_kernel: Callable[..., int | None]
    """(CUfunction, 3 grid dimensions, threads, shared memory bytes, whether the launch may overlap its predecessor,
    stream, 64-bit parameters...) -> the CUDA driver's error code, 0 on success; None without a driver"""
    numbers: Callable[[], Any]
    """() -> an iterator that counts from 0; its ``take(N)`` reserves N consecutive numbers and returns the first"""


class _Choice(NamedTuple):
    functions: Functions | None
    kind: Literal["c++", "numpy"]
    why: str


_choice: _Choice | None = None


def backend() -> tuple[str, str]:
    """Return ``("c++", path of the library)`` or ``("numpy", reason why no library is used)``.

    Raises ConfigError when TAPSCOPE_NATIVE is set to anything but 0, 1 or avx2.
    """
    choice = _chosen()
    return choice.kind, choice.why


def functions() -> Functions | None:
    """Return the C++ entry points, or None if numpy is the backend; raises as :func:`backend`."""
    return (_choice or _chosen()).functions


@contextmanager
def use_backend(kind: Literal["c++", "numpy"]) -> Iterator[None]:
    """Context manager: use this backend in every thread; for tests and measurements.

    Raises ConfigError when ``c++`` is requested but no library can be loaded; the message gives the reason.
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
    """Bind the entry points: frequent calls go through the extension module, the others through ctypes on the same
    file."""
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
