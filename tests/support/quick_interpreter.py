"""Triton's interpreter without work that it repeats for every operation, or does for nothing.

It computes the same: tests/kernels/triton/test_quick_interpreter.py.
"""

import dataclasses
import functools
import inspect
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_np_dtype = interpreter._get_np_dtype


def install() -> None:
    """For this process, to its end."""
    options = interpreter.interpreter_builder.options
    if not options.debug:  # only then would it assert what it computes again in 64 bits, for every sum of integers
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    interpreter._get_np_dtype = np_dtype
    interpreter._patch_builtin = patch_builtin


def np_dtype(kind: Any) -> np.dtype[Any]:
    """The original makes a table of all types to look up one."""
    if isinstance(kind, tl.block_type):
        kind = kind.element_ty
    return np.dtype(np.uint64) if isinstance(kind, tl.pointer_type) else _of_scalar(kind)


@functools.cache
def _of_scalar(kind: Any) -> np.dtype[Any]:
    return _np_dtype(kind)


def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """The original lists and sorts all members of the language, at every call of every function."""
    for name in _callables(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


@functools.cache
def _callables(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if callable(member)]
