"""Which backend serves, and why: the compiled library beside this file, or numpy."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from tapscope import dtypes
from tapscope.errors import ConfigError

ABI = 2
"""Must equal ``TS_ABI`` in common.h: a library left over from another version is not called."""

CODES: dict[str, int] = {name: code for code, name in enumerate(n for n in dtypes.NAMES if n != "complex64")}
"""Element type -> the number common.h gives it."""

CODES_BY_TYPE: dict[np.dtype[Any], int] = {dtypes.numpy_dtype(name): code for name, code in CODES.items()}
"""The same by numpy type, because ``dtype.name`` takes longer than the rest of a small call."""

_VARIABLE = "TAPSCOPE_NATIVE"
_ADDRESS, _INT64, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class Functions(NamedTuple):
    """The C++ entry points, typed; each takes addresses as integers and releases the GIL while it runs."""

    take: Any
    """(data, count, dtype code, copy to or 0, out) -> length of the text"""
    summarize: Any
    """(data, count, dtype code, copy to or 0, out)"""
    hash: Any
    """(data, number of bytes, out)"""
    compare_rows: Any
    """(baseline, target, dtype codes x2, row strides x2, row indices x2 or 0, rows, width, atol, rtol, out x2)"""


class _Choice(NamedTuple):
    functions: Functions | None
    kind: Literal["c++", "numpy"]
    why: str


_choice: _Choice | None = None


def backend() -> tuple[str, str]:
    """``("c++", path of the library)`` or ``("numpy", why there is no library)``.

    Raises ConfigError when TAPSCOPE_NATIVE is set to anything but 0 or 1.
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
        if setting not in ("0", "1"):
            raise ConfigError(f"{_VARIABLE}={setting!r} must be 0 (numpy only) or 1 (the C++ library if it was built)")
        _choice = _load() if setting == "1" else _Choice(None, "numpy", f"{_VARIABLE}=0")
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
        found = library.ts_abi()
    except (OSError, AttributeError) as error:
        return _Choice(None, "numpy", f"{path.name} cannot be loaded: {error}")
    if found != ABI:
        return _Choice(None, "numpy", f"{path.name} was built for interface {found}, not {ABI}; reinstall tapscope")
    return _Choice(_typed(library), "c++", str(path))


def _typed(library: ctypes.CDLL) -> Functions:
    take, summarize, compare = library.ts_take, library.ts_summarize, library.ts_compare_rows
    take.argtypes = summarize.argtypes = [_ADDRESS, _INT64, ctypes.c_int, _ADDRESS, _ADDRESS]
    library.ts_hash.argtypes = [_ADDRESS, _INT64, _ADDRESS]
    compare.argtypes = [
        *(_ADDRESS, _ADDRESS, ctypes.c_int, ctypes.c_int, _INT64, _INT64, _ADDRESS, _ADDRESS),
        *(_INT64, _INT64, _DOUBLE, _DOUBLE, _ADDRESS, _ADDRESS),
    ]
    take.restype = _INT64
    summarize.restype = compare.restype = library.ts_hash.restype = None
    return Functions(take, summarize, library.ts_hash, compare)
